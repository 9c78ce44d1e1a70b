"""Drafts are found where the output repeats known text."""

from array import array

from hypothesis import given
from hypothesis import strategies as st

from parrot.engine.drafts.finder import DraftFinder, Followed

TOKENS = st.integers(0, 4)


def ahead(finder: DraftFinder, context: list[int], limit: int = 8) -> list[int]:
    ids = array("i", context)
    finder.follow(ids)
    return finder.propose(ids, limit)


def test_the_newest_tokens_are_searched_in_the_earlier_context():
    assert ahead(DraftFinder([]), [1, 2, 3, 4, 5, 9, 1, 2, 3], 2) == [4, 5]


def test_a_draft_ends_at_the_end_of_its_text():
    text = [1, 2, 3, 4, 5]
    assert ahead(DraftFinder([text, [7, 8]], in_context=False), [9, 1, 2, 3]) == [4, 5]


def test_a_match_of_two_tokens_is_too_short():
    assert ahead(DraftFinder([]), [1, 2, 3, 9, 1, 2]) == []


def test_the_longest_match_is_taken_and_of_equal_ones_the_last():
    longest = [5, 1, 2, 3, 70, 6, 1, 2, 3, 71, 5, 1, 2, 3]
    assert ahead(DraftFinder([]), longest, 1) == [70]
    equal = [5, 1, 2, 3, 70, 6, 1, 2, 3, 71, 8, 1, 2, 3]
    assert ahead(DraftFinder([]), equal, 1) == [71]


def test_repeating_text_is_drafted_past_its_end():
    assert ahead(DraftFinder([]), [1, 2, 1, 2, 1, 2], 5) == [1, 2, 1, 2, 1]


def test_a_cursor_follows_and_continues_after_an_edit():
    before = [*range(10, 60)]
    finder = DraftFinder([before], in_context=False)
    context = array("i", before[:6])
    finder.follow(context)
    context.extend([6, *before[7:9]])  # One token was replaced.
    finder.follow(context)
    assert finder.propose(context, 3) == before[9:12]


def test_follow_reports_right_and_wrong_tokens():
    finder = DraftFinder([[*range(10, 60)]], in_context=False)
    context = array("i", [10, 11, 12])
    assert finder.follow(context) is None  # Nothing was found before.
    context.extend([13, 14])
    assert finder.follow(context) == Followed(3, 2, False)
    assert finder.follow(context) is None
    context.extend([15, 99, 98])
    assert finder.follow(context) == Followed(5, 1, True)
    assert finder.propose(context, 1) == []


def test_new_text_is_searched_less_often_but_found():
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


def test_the_nearest_match_after_an_edit_is_used():
    part = [1, 2, 3, 4, 5, 6]
    text = [*part, 60, 61, *part, 70, 71, 1, 2, 3, 80]
    finder = DraftFinder([text], in_context=False)
    context = array("i", [60, 61, *part])
    finder.follow(context)
    assert finder.propose(context, 1) == [70]
    context.extend([99, 1, 2])
    finder.follow(context)
    assert finder.propose(context, 2) == [3, 80]


def test_there_is_no_draft_without_a_source():
    assert ahead(DraftFinder([], in_context=False), [1, 2, 3, 4, 1, 2, 3]) == []
    assert ahead(DraftFinder([[]], in_context=False), [1, 2, 3, 4, 1, 2, 3]) == []


@given(st.lists(st.lists(TOKENS, max_size=12), max_size=3), st.lists(TOKENS, min_size=1), st.data())
def test_a_draft_contains_the_tokens_after_a_match(texts, context, data):
    """Any number of tokens may come between two searches."""
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
