"""Drafts are found where the output repeats text that is known."""

from array import array

from hypothesis import given
from hypothesis import strategies as st

from parrot.engine.drafts.finder import DraftFinder, Followed

TOKENS = st.integers(0, 4)


def ahead(finder: DraftFinder, context: list[int], limit: int = 8) -> list[int]:
    ids = array("i", context)
    finder.follow(ids)
    return finder.propose(ids, limit)


def test_the_context_is_searched_for_its_end():
    assert ahead(DraftFinder([]), [1, 2, 3, 4, 5, 9, 1, 2, 3], 2) == [4, 5]


def test_a_text_ends_where_it_ends():
    text = [1, 2, 3, 4, 5]
    assert ahead(DraftFinder([text, [7, 8]], in_context=False), [9, 1, 2, 3]) == [4, 5]


def test_two_tokens_in_common_are_too_few():
    assert ahead(DraftFinder([]), [1, 2, 3, 9, 1, 2]) == []


def test_the_longest_match_is_taken_and_of_equal_ones_the_last():
    longest = [5, 1, 2, 3, 70, 6, 1, 2, 3, 71, 5, 1, 2, 3]
    assert ahead(DraftFinder([]), longest, 1) == [70]
    equal = [5, 1, 2, 3, 70, 6, 1, 2, 3, 71, 8, 1, 2, 3]
    assert ahead(DraftFinder([]), equal, 1) == [71]


def test_what_repeats_itself_is_drafted_beyond_its_end():
    assert ahead(DraftFinder([]), [1, 2, 1, 2, 1, 2], 5) == [1, 2, 1, 2, 1]


def test_a_cursor_follows_and_finds_its_place_again_behind_an_edit():
    before = [*range(10, 60)]
    finder = DraftFinder([before], in_context=False)
    context = array("i", before[:6])
    finder.follow(context)
    context.extend([6, *before[7:9]])  # one token was replaced
    finder.follow(context)
    assert finder.propose(context, 3) == before[9:12]


def test_what_came_as_found_and_what_did_not_is_told():
    finder = DraftFinder([[*range(10, 60)]], in_context=False)
    context = array("i", [10, 11, 12])
    assert finder.follow(context) is None  # nothing was found before
    context.extend([13, 14])
    assert finder.follow(context) == Followed(3, 2, False)
    assert finder.follow(context) is None
    context.extend([15, 99, 98])
    assert finder.follow(context) == Followed(5, 1, True)
    assert finder.propose(context, 1) == []


def test_new_text_is_looked_for_more_and_more_seldom_but_found():
    text = [*range(100, 160)]
    finder = DraftFinder([text], in_context=False)
    context = array("i", [1, 2])
    for token in range(40):
        context.append(token)
        finder.follow(context)
    num_late = 0
    for token in text:
        context.append(token)
        finder.follow(context)
        num_late += not finder.propose(context, 1)
    assert num_late <= 3 + 4


def test_behind_an_edit_the_nearest_place_counts():
    part = [1, 2, 3, 4, 5, 6]
    text = [*part, 60, 61, *part, 70, 71, 1, 2, 3, 80]
    finder = DraftFinder([text], in_context=False)
    context = array("i", [60, 61, *part])
    finder.follow(context)
    assert finder.propose(context, 1) == [70]
    context.extend([99, 1, 2])
    finder.follow(context)
    assert finder.propose(context, 2) == [3, 80]


def test_no_source_no_draft():
    assert ahead(DraftFinder([], in_context=False), [1, 2, 3, 4, 1, 2, 3]) == []
    assert ahead(DraftFinder([[]], in_context=False), [1, 2, 3, 4, 1, 2, 3]) == []


@given(st.lists(st.lists(TOKENS, max_size=12), max_size=3), st.lists(TOKENS, min_size=1), st.data())
def test_a_draft_is_what_follows_a_match(texts, context, data):
    """However many tokens come between two looks."""
    finder = DraftFinder(texts)
    grown = array("i", context[:1])
    while len(grown) < len(context):
        count = data.draw(st.integers(1, 4))
        grown.extend(context[len(grown) : len(grown) + count])
        finder.follow(grown)
        draft = finder.propose(grown, 3)
        assert len(draft) <= 3
        if draft:
            newest = [*grown[-2:], draft[0]]
            known = [*texts, [*grown, *draft]]
            assert any(newest == t[i : i + 3] for t in known for i in range(len(t)))
