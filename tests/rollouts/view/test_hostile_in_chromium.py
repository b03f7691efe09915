"""Texts and media of an episode are shown and cannot act, hide, or reorder anything."""

import numpy as np
import pytest
from chromium import PHONE
from viewer_episodes import media_episode

from renderers import PlaceholderRange
from renderers.media.item import MediaSource
from rollouts import FinishReason, MediaReference, Provenance, TokenNode, Trajectory, Turn, WeightSpan
from rollouts.view import write_html

pytestmark = pytest.mark.browser

MARKUP = (
    "<script>window.attacked = 1</script>",
    "</script><script>window.attacked = 2</script>",
    '<img src=x onerror="window.attacked = 3">',
    '<svg onload="window.attacked = 4"><script>window.attacked = 5</script></svg>',
    '<a href="javascript:window.attacked = 6">a link</a>',
    "[a link](javascript:window.attacked=7) ![image](https://attacker.example/image.png)",
    "<style>* { display: none !important }</style>",
    '<iframe src="https://attacker.example/"></iframe><meta http-equiv="refresh" content="0;url=https://attacker.example">',
    '<link rel="stylesheet" href="https://attacker.example/style.css"><base href="https://attacker.example/">',
    '"><form action="https://attacker.example"><input autofocus onfocus="window.attacked = 8">',
    "{{constructor.constructor('window.attacked = 9')()}}",
    "]]></textarea></title></noscript><!-- -->",
)
INVISIBLE = {
    "\u202e": "RLO",
    "\u2066": "LRI",
    "\u200b": "ZWSP",
    "\u200d": "ZWJ",
    "\ufeff": "BOM",
    "\x00": "\u2400",
    "\x1b": "\u241b",
    "\x7f": "\u2421",
    "\u3164": "U+3164",
    "\U000e0041": "U+E0041",
    "\ufe0e": "U+FE0E",
    "\u2028": "LS",
    "\ue000": "U+E000",
}
SVG = (
    b'<svg xmlns="http://www.w3.org/2000/svg" onload="window.attacked = 10"><script>window.attacked = 11</script></svg>'
)
HTML = b"<html><script>window.attacked = 12</script></html>"
BROKEN_PNG = b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR\x7f\xff\xff\xff\x7f\xff\xff\xff\x08\x02\x00\x00\x00"


def hostile(text: str) -> Trajectory:
    """An episode in which every text is `text`."""
    source = MediaSource.of(SVG)
    prompt = TokenNode(
        -1,
        np.arange(4, dtype=np.int32),
        np.zeros(4, bool),
        np.empty(0, np.float32),
        media=(MediaReference("image", text, source, PlaceholderRange(0, 1)),),
        messages=(
            {
                "role": text,
                "name": text,
                "content": [
                    {"type": "text", "text": text},
                    {"type": "image", "image": source},
                    {"type": text, text: text},
                ],
            },
        ),
        extras={text: np.zeros(4)},
    )
    sampled = TokenNode(
        0, np.arange(2, dtype=np.int32), np.ones(2, bool), np.zeros(2, np.float32), (WeightSpan(text, 0, 2),)
    )
    call = {"id": text, "type": "function", "function": {"name": text, "arguments": {text: text}}}
    message = {"role": "assistant", "content": text, "reasoning_content": text, "tool_calls": [call]}
    turn = Turn(1, FinishReason.STOP, message, info={text: text}, agent=text)
    return Trajectory(
        text,
        group_id=text,
        nodes=[prompt, sampled],
        turns=[turn],
        error=text,
        truncated=True,
        truncation_reason=text,
        metrics={text: 1.0},
        provenance=Provenance(text, text, text, {"image": text}, {text: text}),
    )


@pytest.mark.contract
def test_markup_in_any_text_is_shown_as_text_in_every_view(tmp_path, open_page):
    text = "\n".join(MARKUP)
    path = tmp_path / "page.html"
    write_html([hostile(text), hostile(text)], path, title=text, problems=[text])
    opened = open_page(path)
    for view in ("conversation", "tokens", "prompt", "tree", "drift", "compare", "details"):
        opened.show(f"#e=0&v={view}")
        if view == "conversation":
            opened.page.wait_for_selector(".broken")
            shown = opened.evaluate("[...document.querySelectorAll('.message.text')].map(each => each.textContent)")
            assert shown[0] == text  # all of it, as characters
            assert opened.texts(".broken")[0].startswith("image: it cannot be decoded")
        if view == "compare":
            opened.until("document.querySelectorAll('.column .message.head').length === 4")
    assert opened.evaluate("window.attacked") is None
    assert opened.evaluate("document.querySelectorAll('iframe, form, link, base, svg, style').length") == 1  # its own
    hrefs = opened.evaluate("[...document.querySelectorAll('a')].map(link => link.getAttribute('href'))")
    assert all(href.startswith("#") for href in hrefs)
    opened.screenshot("hostile")
    opened.check_quiet()


def test_characters_that_cannot_be_seen_are_labelled_and_reorder_nothing(tmp_path, open_page):
    path = tmp_path / "page.html"
    text = "".join(f"a{character}b" for character in INVISIBLE)
    write_html([hostile(text)], path)
    opened = open_page(path)
    opened.show("#e=0")
    labels = opened.evaluate("[...document.querySelectorAll('.message.text')][0].querySelectorAll('.ctl').length")
    shown = opened.evaluate("[...document.querySelectorAll('.message.text')][0].textContent")
    assert labels == len(INVISIBLE)
    assert shown == "".join(f"a{label}b" for label in INVISIBLE.values())
    everything = opened.evaluate(
        "document.body.innerText + document.title + [...document.querySelectorAll('[title]')].map(each => each.title)"
    )
    assert [
        character for character in INVISIBLE if character in everything.replace(opened.evaluate("document.title"), "")
    ] == []


def test_joined_emoji_and_text_from_right_to_left_are_left_as_they_are(tmp_path, open_page):
    path = tmp_path / "page.html"
    text = "\U0001f469\u200d\U0001f52c \u2764\ufe0f \u05e9\u05dc\u05d5\u05dd \u0645\u0631\u062d\u0628\u0627"
    write_html([hostile(text)], path)
    opened = open_page(path)
    opened.show("#e=0")
    assert opened.evaluate("document.querySelector('.message.text').textContent") == text
    assert opened.evaluate("document.querySelectorAll('.message.text .ctl').length") == 0


@pytest.mark.parametrize("character", ["w", "\u0000", "\U0001f600", "\u0301"])
def test_a_word_of_a_million_characters_stays_inside_the_page_and_its_end_can_be_read(tmp_path, open_page, character):
    path = tmp_path / "page.html"
    word = character * 1_000_000 + "END"
    message = {"role": "user", "content": word}
    node = TokenNode(-1, np.arange(3, dtype=np.int32), np.zeros(3, bool), np.empty(0, np.float32), messages=(message,))
    write_html([Trajectory("word", nodes=[node])], path)
    opened = open_page(path, PHONE)
    opened.show("#e=0")
    opened.evaluate("""() => new Promise((resolve) => {
        const view = document.getElementById("view");
        const step = () => {
            view.scrollTop = view.scrollHeight;
            const last = [...document.querySelectorAll(".message.text")].at(-1).textContent;
            if (last.endsWith("END")) resolve();
            else requestAnimationFrame(step);
        };
        step();
    })""")
    assert opened.evaluate("document.documentElement.scrollWidth") <= PHONE[0]
    assert opened.evaluate("document.getElementById('view').scrollWidth") <= PHONE[0]
    opened.check_quiet()


def test_broken_and_foreign_media_are_named_and_never_decoded_by_the_browser(tmp_path, open_page):
    path = tmp_path / "page.html"
    images = [("image", SVG), ("image", HTML), ("image", BROKEN_PNG), ("video", SVG)]
    write_html([media_episode(*images, ("audio", SVG), ("audio", HTML), ("audio", b"ID3" + HTML))], path)
    opened = open_page(path)
    opened.show("#e=0")
    opened.page.wait_for_selector(".broken >> nth=6")
    assert opened.evaluate("document.querySelectorAll('img, audio').length") == 0
    assert opened.evaluate("window.attacked") is None
    opened.check_quiet()


@pytest.mark.contract
def test_the_policy_stops_a_script_that_got_into_the_page(tmp_path, open_page):
    """The second barrier: markup and scripts that a defect of the page would let in do not act either."""
    path = tmp_path / "page.html"
    write_html([hostile("x")], path)
    changed = path.read_bytes().replace(
        b"</body>", b"<script>window.attacked = 1</script><img src=x onerror='window.attacked = 2'></body>"
    )
    path.write_bytes(changed)
    opened = open_page(path)
    opened.show("#e=0")
    assert opened.evaluate("window.attacked") is None
    assert any("Content Security Policy" in message for message in opened.messages)
    with pytest.raises(Exception, match="TrustedHTML"):
        opened.evaluate("document.body.innerHTML = '<b>x</b>'")


def test_a_tree_of_two_thousand_forks_below_each_other_is_shown_to_its_end(tmp_path, open_page):
    nodes = [TokenNode(-1, np.zeros(1, np.int32), np.zeros(1, bool), np.empty(0, np.float32))]
    for _ in range(2000):
        parent = len(nodes) - 1
        nodes += [TokenNode(parent, np.zeros(1, np.int32), np.zeros(1, bool), np.empty(0, np.float32))] * 2
    path = tmp_path / "page.html"
    write_html([Trajectory("forks", nodes=nodes)], path)
    opened = open_page(path)
    opened.show("#e=0&v=tree")
    opened.until("document.querySelectorAll('.blocks > *').length", 4001)
    opened.evaluate("document.getElementById('view').scrollTop = 1e9")
    opened.until("[...document.querySelectorAll('.node .index')].at(-1)?.textContent", "4000")
    opened.show("#e=0&v=tokens")
    assert "2001 tokens" in opened.texts("#branch option:checked")[0].replace(",", "")
    opened.check_quiet()
