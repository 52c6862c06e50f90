//! The stamp that ties a compiled kernel to its source.
//!
//! A PTX file begins with three comments: what it was made of, by which compiler, and the hashes of
//! the source and of what follows. So a changed source without its PTX is found without a compiler,
//! and so is an edited PTX.

use sha2::{Digest, Sha256};

/// Where the hash of the source stands.
const SOURCE: &str = "// source sha256: ";
/// Where the hash of everything after the stamp stands.
const REST: &str = "// rest sha256: ";

/// PTX with its stamp, as it is committed.
pub fn stamped(source_name: &str, source: &str, compiler: &str, ptx: &str) -> String {
    // The compiler ends its text with a zero, and with more or fewer empty lines.
    let rest = format!("{}\n", ptx.trim_matches(['\0', '\n']));
    format!(
        "// Made of {source_name} by `cargo xtask kernels build`, with {compiler}; do not edit.\n\
         {SOURCE}{}\n{REST}{}\n{rest}",
        hash(source),
        hash(&rest)
    )
}

/// Whether the PTX was made of this source; otherwise what is wrong with it.
pub fn judge(source: &str, ptx: &str) -> Result<(), &'static str> {
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
        assert_eq!(judge("source\n", &ptx), Ok(()));
        for (source, ptx, words) in [
            ("source \n", ptx.clone(), "was changed"),
            ("source\n", ptx.replace("ret", "nop"), "was edited"),
            ("source\n", format!("{ptx}\n"), "was edited"),
            ("source\n", String::from(".version 8.7\n"), "no stamp"),
            ("source\n", String::new(), "no stamp"),
        ] {
            let reason = judge(source, &ptx).unwrap_err();
            assert!(reason.contains(words), "{reason}");
        }
    }

    #[test]
    fn the_same_is_stamped_the_same() {
        let make = |ptx: &str| stamped("a.cu", "source", "compiler 1", ptx);
        assert_eq!(make("ret;\n"), make("ret;\n\n\0"));
    }
}
