//! Misuse that does not compile.

#[test]
fn use_after_submit_and_waiting_twice_do_not_compile() {
    trybuild::TestCases::new().compile_fail("tests/it/ui/*.rs");
}
