//! The cycles of a graph.

use std::collections::BTreeSet;

/// Returns the groups of nodes that all reach each other, the largest first, without single nodes.
pub fn cycles(nodes: usize, edges: &[(usize, usize)]) -> Vec<Vec<usize>> {
    let reached: Vec<BTreeSet<usize>> = (0..nodes).map(|node| reach(node, edges)).collect();
    let mut seen: BTreeSet<usize> = BTreeSet::new();
    let mut cycles = Vec::new();
    for node in 0..nodes {
        let reaches =
            |from: usize, to: usize| reached.get(from).is_some_and(|all| all.contains(&to));
        if reaches(node, node) && !seen.contains(&node) {
            let cycle: Vec<usize> =
                (0..nodes).filter(|other| reaches(node, *other) && reaches(*other, node)).collect();
            seen.extend(&cycle);
            cycles.push(cycle);
        }
    }
    cycles.sort_by_key(|cycle| std::cmp::Reverse(cycle.len()));
    cycles
}

/// Returns the nodes that a node reaches by its edges.
fn reach(node: usize, edges: &[(usize, usize)]) -> BTreeSet<usize> {
    let mut reached = BTreeSet::new();
    let mut left = vec![node];
    while let Some(from) = left.pop() {
        let next = edges.iter().filter(|(start, _)| *start == from).map(|(_, end)| *end);
        left.extend(next.filter(|end| reached.insert(*end)));
    }
    reached
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cycles_are_found_the_largest_first() {
        let edges = [(0, 1), (1, 0), (1, 2), (2, 3), (3, 4), (4, 2), (4, 5), (6, 6)];
        assert_eq!(cycles(7, &edges), [vec![2, 3, 4], vec![0, 1], vec![6]]);
        assert!(cycles(3, &[(0, 1), (1, 2), (0, 2)]).is_empty());
    }
}
