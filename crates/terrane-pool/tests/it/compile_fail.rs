//! Programs that must not compile.

#[test]
fn misuse_of_handles_does_not_compile() {
    let cases = trybuild::TestCases::new();
    cases.compile_fail("tests/compile_fail/*.rs");
}
