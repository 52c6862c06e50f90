//! Code that must not compile: the builder in the wrong order, and layouts with two owners.

#[test]
fn wrong_orders_do_not_compile() {
    trybuild::TestCases::new().compile_fail("tests/compile_fail/*.rs");
}
