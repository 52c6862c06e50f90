//! What must not compile: memory that is swapped, taken or doubled behind its registration.

#[test]
fn registered_memory_has_no_mutable_access_and_one_owner() {
    trybuild::TestCases::new().compile_fail("tests/compile_fail/*.rs");
}
