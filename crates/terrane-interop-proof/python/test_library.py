"""The library loads, and its counters begin at zero."""

from proof import ProofTest, live


class Library(ProofTest):
    def test_nothing_is_alive_at_first(self):
        self.assertEqual(live(), (0, 0))
