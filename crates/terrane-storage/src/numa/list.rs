//! The kernel's lists of numbers, such as `0-3,8,10-11`.

/// The maximum length of a list. It bounds the allocation for a damaged file.
const MAX_MEMBERS: usize = 1 << 16;

/// The members of a list, ascending as the kernel prints them. An empty text is an empty list.
/// `None` if the text is not a list.
pub(super) fn parse_list(text: &str) -> Option<Vec<u32>> {
    let text = text.trim_matches(|c: char| c.is_ascii_whitespace() || c == '\0');
    let mut members = Vec::new();
    if text.is_empty() {
        return Some(members);
    }
    for part in text.split(',') {
        let (first, last) = match part.split_once('-') {
            Some((first, last)) => (first.trim().parse().ok()?, last.trim().parse().ok()?),
            None => {
                let only: u32 = part.trim().parse().ok()?;
                (only, only)
            }
        };
        let length = usize::try_from(last.checked_sub(first)?).ok()?.checked_add(1)?;
        if members.len().checked_add(length)? > MAX_MEMBERS {
            return None;
        }
        members.extend(first..=last);
    }
    Some(members)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_as_the_kernel_prints_them() {
        assert_eq!(parse_list("0-3,8,10-11\n"), Some(vec![0, 1, 2, 3, 8, 10, 11]));
        assert_eq!(parse_list("0\n"), Some(vec![0]));
        assert_eq!(parse_list("\n"), Some(vec![]));
        assert_eq!(parse_list(""), Some(vec![]));
    }

    #[test]
    fn other_texts_are_refused() {
        for text in ["a", "3-1", "1-", "-1", "1,,2", "0-4294967295"] {
            assert_eq!(parse_list(text), None, "{text:?}");
        }
    }
}
