//! Registered memory cannot be swapped, moved out or cloned.

#[test]
fn registered_memory_has_no_mutable_access_and_one_owner() {
    trybuild::TestCases::new().compile_fail("tests/compile_fail/*.rs");
}
