//! The stamp that ties a compiled kernel to its source.
//!
//! A PTX file begins with three comments: its source and compiler, the hash of the source, and the
//! hash of the text after the stamp. With these hashes, `tidy` detects a changed source without new
//! PTX, and an edited PTX, without a compiler.

use sha2::{Digest, Sha256};

/// The prefix of the line with the hash of the source.
const SOURCE: &str = "// source sha256: ";
/// The prefix of the line with the hash of everything after the stamp.
const REST: &str = "// rest sha256: ";

/// Returns PTX with its stamp, in the committed form.
pub fn stamped(source_name: &str, source: &str, compiler: &str, ptx: &str) -> String {
    // The compiler's text ends with a zero byte and a varying number of empty lines.
    let rest = format!("{}\n", ptx.trim_matches(['\0', '\n']));
    format!(
        "// Made of {source_name} by `cargo xtask kernels build`, with {compiler}; do not edit.\n\
         {SOURCE}{}\n{REST}{}\n{rest}",
        hash(source),
        hash(&rest)
    )
}

/// Checks that the PTX was compiled from this source. Otherwise returns the problem.
pub fn check_stamp(source: &str, ptx: &str) -> Result<(), &'static str> {
    let mut parts = ptx.splitn(4, '\n');
    let mut next = |prefix: &str| parts.next().and_then(|line| line.strip_prefix(prefix));
    let (_, of_source, of_rest) = (next("// Made of "), next(SOURCE), next(REST));
    let (Some(of_source), Some(of_rest), Some(rest)) = (of_source, of_rest, parts.next()) else {
        return Err("its PTX has no stamp; run `cargo xtask kernels build`");
    };
    if of_source != hash(source) {
        return Err("was changed after its PTX was made; run `cargo xtask kernels build`");
    }
    if of_rest != hash(rest) {
        return Err("its PTX was edited; run `cargo xtask kernels build`");
    }
    Ok(())
}

/// SHA-256, in hexadecimal digits.
fn hash(text: &str) -> String {
    Sha256::digest(text.as_bytes()).iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hashes_are_those_of_the_standard() {
        let of_abc = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
        assert_eq!(hash("abc"), of_abc);
    }

    #[test]
    fn a_stamp_fits_its_source_and_no_other() {
        let ptx = stamped("a.cu", "source\n", "compiler 1", "\n.version 8.7\nret;\n\n\0");
        assert!(ptx.ends_with("\n.version 8.7\nret;\n"), "{ptx}");
        assert_eq!(check_stamp("source\n", &ptx), Ok(()));
        for (source, ptx, words) in [
            ("source \n", ptx.clone(), "was changed"),
            ("source\n", ptx.replace("ret", "nop"), "was edited"),
            ("source\n", format!("{ptx}\n"), "was edited"),
            ("source\n", String::from(".version 8.7\n"), "no stamp"),
            ("source\n", String::new(), "no stamp"),
        ] {
            let reason = check_stamp(source, &ptx).unwrap_err();
            assert!(reason.contains(words), "{reason}");
        }
    }

    #[test]
    fn equal_text_has_equal_stamps() {
        let make = |ptx: &str| stamped("a.cu", "source", "compiler 1", ptx);
        assert_eq!(make("ret;\n"), make("ret;\n\n\0"));
    }
}
