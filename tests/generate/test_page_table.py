"""The table of the pages of each slot."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from groupwise.generate.page_table import PageTable

SPARE = 99
actions = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 98), st.booleans()), max_size=40)


@given(actions, st.integers(1, 5))
def test_a_table_equals_lists_of_pages(changes, page_tokens):
    table = PageTable(4, 42, page_tokens, SPARE)
    lists: list[list[int]] = [[], [], [], []]
    for slot, page, new in changes:
        if new or not lists[slot]:
            lists[slot] = [page, page + 1]
            table.assign(slot, lists[slot])
        else:
            lists[slot].append(page)
            table.append(slot, page)
    used = [slot for slot, pages in enumerate(lists) if pages]
    if not used:
        return
    slots = np.array(used[::-1])
    most = max(len(pages) for pages in lists)
    wanted = [lists[slot] + [SPARE] * (most - len(lists[slot])) for slot in slots]
    assert table.rows(slots).tolist() == wanted
    for place in range(most * page_tokens):
        wanted_pages = [row[place // page_tokens] for row in wanted]
        assert table.page_at(slots, np.full(len(slots), place)).tolist() == wanted_pages
