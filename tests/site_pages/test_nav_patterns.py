"""Patterns in the navigation of the documentation site."""

from nav_patterns import expanded

PAGES = ["a.md", "b.md", "guides/deep/x.md", "guides/y.md", "guides/z.md"]


def test_a_pattern_becomes_the_pages_of_its_folder_in_order() -> None:
    assert expanded([{"Guides": ["guides/*.md"]}], PAGES) == [{"Guides": ["guides/y.md", "guides/z.md"]}]


def test_a_page_with_an_entry_of_its_own_is_not_repeated_by_a_pattern() -> None:
    nav = [{"Guides": ["guides/*.md", {"First": "guides/y.md"}]}, "*.md", {"Bee": "b.md"}]
    assert expanded(nav, PAGES) == [{"Guides": ["guides/z.md", {"First": "guides/y.md"}]}, "a.md", {"Bee": "b.md"}]


def test_a_section_without_pages_is_left_out_but_a_page_that_does_not_exist_stays_for_the_strict_build() -> None:
    assert expanded([{"None": [{"Below": ["absent/*.md"]}]}, {"Absent": "absent.md"}], PAGES) == [
        {"Absent": "absent.md"}
    ]
