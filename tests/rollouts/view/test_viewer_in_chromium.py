"""The page in a real Chromium: list, views, keys, links, both themes, a telephone's width."""

from dataclasses import replace

import numpy as np
import pytest
from chromium import AXE, PHONE, serious_violations
from viewer_episodes import two_turns, with_likeliest

from rollouts import FinishReason, Trajectory
from rollouts.view import episode_data, write_html

pytestmark = pytest.mark.browser

EPISODE = ".episodehead .facts"


def rows(opened):
    return opened.texts("tbody tr td.id")


def test_cut_turns_are_counted_in_the_list_and_above_the_episode(renderer, tmp_path, open_page):
    cut, whole = two_turns(renderer, "cut"), two_turns(renderer, "whole")
    turns = [replace(turn, finish_reason=FinishReason.LENGTH) for turn in cut.turns[:2]] + list(cut.turns[2:])
    cut = Trajectory("cut", nodes=cut.nodes, turns=turns, done=True)
    write_html([cut, whole], tmp_path / "page.html")
    opened = open_page(tmp_path / "page.html")
    assert opened.texts("#count") == ["2 of 2 episodes, mean environment reward 1.5, 2 of 6 turns cut at max_tokens"]
    assert "3 turns (2 cut at max_tokens)" in opened.texts(EPISODE)[0]
    opened.page.fill("#filter", "cut>0")
    assert rows(opened) == ["cut"]
    opened.page.fill("#filter", "cut=0")
    assert opened.texts("#count") == ["1 of 2 episodes, mean environment reward 1.5"]


def test_the_list_filters_and_sorts(small_page, open_page):
    opened = open_page(small_page)
    assert rows(opened) == ["two-turns", "sibling", "drifted", "called", "failed", "media"]
    for query, expected in (
        ("status:error", ["failed"]),
        ("group:doors reward>1", ["two-turns", "sibling"]),
        ("version:1 mismatch>=0.25", ["two-turns", "sibling"]),
        ("turns=1", ["drifted", "called"]),
        ('"went away"', ["failed"]),
        ("length<4", ["failed"]),
    ):
        opened.page.fill("#filter", query)
        assert rows(opened) == expected, query
    opened.page.fill("#filter", "rewardd>1")
    assert '"rewardd" is not a number of an episode' in opened.texts("#count")[0]
    opened.page.fill("#filter", "")
    opened.page.click("th.length button")
    lengths = [int(text.replace(",", "")) for text in opened.texts("tbody tr td.length")]
    assert lengths == sorted(lengths, reverse=True)
    opened.page.click("th.mismatch button")
    assert rows(opened)[:2] == ["two-turns", "sibling"]
    assert opened.page.get_attribute("th.mismatch", "aria-sort") == "descending"
    opened.check_quiet()


def test_the_list_searches_in_the_texts_of_messages(small_page, open_page):
    opened = open_page(small_page)
    opened.page.keyboard.press("/")
    opened.page.keyboard.type('text:"and THIS?"')
    opened.until(
        "[...document.querySelectorAll('tbody tr td.id')].map(cell => cell.textContent).join()", "two-turns,sibling"
    )
    for query, expected in (
        ("text:日本 text:blue reward>1", "two-turns,sibling"),
        ("text:reed", "drifted"),
        ("text:look", "called"),  # also a part of a tool call
        ("text:user", ""),  # a role is no text
        ("text:", "two-turns,sibling,drifted,called,failed,media"),
    ):
        opened.page.fill("#filter", query)
        opened.until("[...document.querySelectorAll('tbody tr td.id')].map(cell => cell.textContent).join()", expected)
        opened.until("document.querySelector('#count').textContent.includes('searched')", False)
    opened.check_quiet()


@pytest.mark.contract
def test_the_conversation_has_messages_images_and_ends_of_turns(small_page, open_page):
    opened = open_page(small_page)
    opened.show("#e=0&b=3")
    opened.page.wait_for_selector("figure img >> nth=1")
    assert opened.texts(".message.text") == ["Which colour?", "Red. 日本", "And this? ✓ 日本", "Blue."]
    assert [text.splitlines()[0] for text in opened.texts(".message.head")] == [
        "user",
        "assistant",
        "user",
        "assistant",
    ]
    sizes = opened.evaluate(
        "[...document.querySelectorAll('figure img')].map(image => [image.naturalWidth, image.naturalHeight])"
    )
    assert sizes == [[32, 32], [32, 32]]
    assert "pixels computed again: equal" in opened.texts("figcaption")[0]
    assert "weights 1" in opened.texts(".message.head")[3]
    opened.screenshot("conversation")
    opened.check_quiet()


@pytest.mark.contract
def test_the_token_view_has_the_text_of_the_branch_and_tells_what_is_known_of_a_token(small_page, open_page):
    opened = open_page(small_page)
    opened.show("#e=0&v=tokens&b=3")
    texts = opened.evaluate("[...document.querySelectorAll('.tokens .t')].map(token => token.textContent)")
    joined = "".join(texts).replace("⏎", "")
    assert "And this? ✓ 日本<|im_end|>" in joined
    assert "<|image_pad|>" not in joined  # the placeholder is a picture
    assert len(opened.texts(".tokenmedia figure")) == 2
    opened.page.locator(".t", has_text="B").last.click()
    facts = dict(zip(opened.texts("#token dt"), opened.texts("#token dd"), strict=True))
    assert (facts["text"], facts["owner"], facts["mask"], facts["weights"]) == ('"B"', "assistant", "sampled", "1")
    assert (facts["log-prob"], facts["mismatch"], facts["entropy"]) == ("-0.5 (p = 0.6065)", "0.25", "0")
    token = int(opened.evaluate("new URLSearchParams(location.hash.slice(1)).get('t')"))
    assert opened.evaluate("document.querySelector('.chosen').dataset.token") == str(token)
    opened.page.keyboard.press("ArrowRight")
    opened.until("document.querySelector('.chosen').dataset.token", str(token + 1))
    opened.screenshot("tokens")
    opened.check_quiet()


def test_the_likeliest_tokens_stand_beside_the_numbers_of_a_token_and_cannot_act(
    renderer, tmp_path, open_page, monkeypatch
):
    attack = '<img src=x onerror="window.attacked = 1">\u202e\n'
    text_of = episode_data._text
    (hostile,) = renderer.tokenizer.encode_scaffold("x")
    monkeypatch.setattr(
        episode_data, "_text", lambda *of: (0, attack.encode()) if of[2] == hostile else text_of(*of)
    )  # a tokenizer may have such a token
    first, later = [("R", -0.5), ("x", -1.0)], [("G", -0.25), ("x", -2.0)]
    trajectory = with_likeliest(renderer, first, later)
    node = trajectory.nodes[1]
    teacher = {"teacher_top_ids": node.extras["top_ids"], "teacher_top_logprobs": node.extras["top_logprobs"] - 1}
    extras = {**node.extras, **teacher, "teacher_logprobs": np.full(len(node), -3, np.float32)}
    three = {"top_ids": np.tile(np.array([3, 2, 1], np.int32), (len(node), 1))}
    three["top_logprobs"] = -np.arange(3 * len(node), dtype=np.float32).reshape(-1, 3)
    nodes = [trajectory.nodes[0], replace(node, extras=extras), replace(node, parent=1, extras=three)]
    write_html([Trajectory("e", nodes=nodes, turns=trajectory.turns)], tmp_path / "page.html", renderer=renderer)
    opened = open_page(tmp_path / "page.html")
    opened.show("#e=0&v=tokens")
    start = len(nodes[0])
    opened.page.locator(f'.t[data-token="{start}"]').hover()
    opened.page.wait_for_selector("#token:not([hidden])")
    shown = """[...document.querySelectorAll('#token .likeliest')].map(
        table => [...table.rows].map(row => [...row.cells].map(cell => cell.textContent)))"""
    unseen = '"<img src=x onerror=\\"window.attacked = 1\\">RLO\\n"'
    sampler, taught = opened.evaluate(shown)
    assert sampler == [
        ["", "id", "log-prob", "p"],
        ["●", '"R"', str(node.token_ids[0]), "-0.5", "0.607"],
        ["", unseen, str(hostile), "-1", "0.368"],
    ]
    assert [row[3] for row in taught[1:]] == ["-1.5", "-2"]
    opened.screenshot("likeliest")
    opened.page.locator(f'.t[data-token="{start}"]').click()
    opened.page.keyboard.press("ArrowRight")  # a token that is none of them
    opened.until("document.querySelector('.chosen').dataset.token", str(start + 1))
    sampler, taught = opened.evaluate(shown)
    assert [(row[0], row[3]) for row in sampler[1:]] == [("", "-0.25"), ("", "-2"), ("●", "-0.5")]
    assert [(row[0], row[3]) for row in taught[1:]] == [("", "-1.25"), ("", "-3"), ("●", "-3")]
    opened.page.locator(f'.t[data-token="{start + len(node) + 2}"]').hover()  # of a node with another number of them
    opened.until("document.querySelectorAll('#token .likeliest').length", 1)
    assert [row[2:4] for row in opened.evaluate(shown)[0][1:4]] == [["3", "-6"], ["2", "-7"], ["1", "-8"]]
    opened.page.locator('.t[data-token="0"]').hover()  # of the prompt
    opened.until("document.querySelectorAll('#token .likeliest').length", 0)
    assert opened.evaluate("window.attacked") is None
    opened.check_quiet()


def test_each_colouring_colours_the_tokens_that_have_its_number(small_page, open_page):
    opened = open_page(small_page)
    opened.show("#e=0&v=tokens&b=3")
    names = opened.evaluate("[...document.querySelectorAll('#colour option')].map(option => option.value)")
    assert names == ["owner", "sampled", "logprob", "entropy", "mismatch", "extra:value"]
    count = "document.querySelectorAll('.tokens .t').length"
    tokens = opened.evaluate(count)
    coloured = {}
    for name in names[1:]:
        opened.page.select_option("#colour", name)
        opened.until(count, tokens)  # blocks are filled when the browser has laid them out
        coloured[name] = opened.evaluate("document.querySelectorAll('.tokens .t:not(.unsampled)').length")
    assert 0 < coloured["sampled"] == coloured["logprob"] < tokens
    assert coloured["entropy"] == coloured["mismatch"] == coloured["extra:value"] == len("Blue.") + 1


@pytest.mark.contract
def test_the_raw_prompt_is_what_the_engine_saw(small_page, open_page):
    opened = open_page(small_page)
    opened.show("#e=0&v=prompt&b=3")
    text = "".join(opened.texts(".raw"))
    assert text.startswith("<|im_start|>user\n<|vision_start|>")
    assert "<|image_pad|> \u00d7 4" in text
    assert text.endswith("Blue.<|im_end|>")
    assert opened.texts("#until option")[1:] == ["prompt of turn 1, 38 tokens", "prompt of turn 2, 96 tokens"]
    opened.page.select_option("#until", "0")
    assert "Red." not in "".join(opened.texts(".raw"))


@pytest.mark.contract
def test_the_tree_shows_forks_and_leads_to_the_tokens_of_a_node(small_page, open_page):
    opened = open_page(small_page)
    opened.show("#e=0&v=tree")
    lines = opened.texts(".node")
    assert [line.split("\n")[0].split()[0] for line in lines] == ["0", "1", "2", "3", "4", "5"]
    assert len(opened.texts(".fork")) == 2
    opened.screenshot("tree")
    opened.page.locator(".node").nth(3).click()
    opened.page.wait_for_selector(".chosen")
    assert "b=3" in opened.evaluate("location.hash")


def test_drift_shows_where_the_history_differs_from_a_full_render(small_page, open_page):
    opened = open_page(small_page)
    opened.show("#e=2&v=drift")
    assert "differs" in opened.texts(".note")[0]
    assert len(opened.texts(".hunk")) == 1
    assert "".join(opened.texts(".inserted")) == "e"
    opened.show("#e=0&v=drift&b=3")
    opened.until("document.querySelector('.note').textContent.includes('gives exactly')")
    opened.check_quiet()


@pytest.mark.contract
def test_tool_calls_have_their_status(small_page, open_page):
    opened = open_page(small_page)
    opened.show("#e=3")
    assert opened.texts(".callhead .chip") == ["ok", "invalid json"]
    assert "1 invalid tool call" in opened.texts(".message.head")[1]


def test_the_episodes_of_a_group_stand_side_by_side(small_page, open_page):
    opened = open_page(small_page)
    opened.show("#e=0&v=compare")
    opened.until("document.querySelectorAll('.column .message.head').length >= 8")
    assert opened.texts(".columnhead a") == ["two-turns", "sibling", "drifted", "called"]
    opened.screenshot("compare")
    opened.check_quiet()


def test_frames_of_a_video_are_shown_and_an_image_that_cannot_be_shown_says_why(small_page, open_page):
    opened = open_page(small_page)
    opened.show("#e=5")
    opened.page.wait_for_selector("figure img >> nth=15")
    opened.page.wait_for_selector(".broken")
    assert "40 frames" in opened.texts("figcaption")[0]
    assert opened.texts(".frame")[-1] == "3.9 s"
    assert opened.texts(".broken")[0].startswith("image: it cannot be decoded")
    opened.screenshot("video")


def test_a_sound_has_a_waveform_and_is_played_from_where_it_is_clicked(small_page, open_page):
    opened = open_page(small_page)
    opened.show("#e=5")
    opened.page.wait_for_selector(".wave .whole path")
    caption = opened.texts("figcaption")[2]
    assert "audio · 2 s · 44,100 Hz · mono · samples · peak 0.8" in caption
    assert "tokens 2\u20132 (1)" in caption
    duration = "document.querySelector('audio').duration"
    opened.until(f"Math.round(100 * {duration})", 200)
    opened.page.locator(".wave").click(position={"x": 210, "y": 20})
    opened.until("document.querySelector('audio').currentTime > 1")
    opened.until("document.querySelector('.heard').style.clipPath !== ''")
    opened.page.locator(".sound").scroll_into_view_if_needed()
    opened.screenshot("sound")
    width = "document.querySelector('.sound').getBoundingClientRect().width"
    assert opened.evaluate(width) == 420
    opened.page.set_viewport_size({"width": 900, "height": 900})  # a pane that is narrower
    pane = "document.querySelector('.sound').closest('.block').getBoundingClientRect().width"
    assert opened.evaluate(width) < opened.evaluate(pane) < 420
    opened.show("#e=5&v=tokens")
    opened.page.wait_for_selector(".tokenmedia audio")
    opened.screenshot("sound-tokens")
    opened.check_quiet()


def test_the_page_begins_with_the_first_episode_and_titles_it_by_its_task(small_page, open_page):
    opened = open_page(small_page)
    opened.page.wait_for_selector(".message.head")
    assert opened.texts("h2")[0] == "doors"
    assert opened.texts(EPISODE)[0].startswith("episode two-turns · environment reward ")
    assert opened.page.title() == "doors, 6 episodes"
    opened.page.keyboard.press("Escape")
    opened.until("document.querySelector('h2').textContent", "No episode is open")
    assert opened.page.title() == "6 episodes"
    opened.check_quiet()


def test_the_name_of_a_task_and_its_attempt_are_whole_in_the_list_of_a_small_window(open_page, tmp_path):
    episodes = [Trajectory(f"room-{number}/1.0", group_id=f"room-{number}") for number in range(3)]
    write_html(episodes, tmp_path / "page.html")
    opened = open_page(tmp_path / "page.html", (1200, 880))
    assert len(rows(opened)) == 3
    cut_off = "[...document.querySelectorAll('td.id, thead th')].filter(cell => cell.scrollWidth > cell.clientWidth)"
    assert opened.evaluate(f"{cut_off}.map(cell => cell.textContent)") == []


def test_the_visible_messages_are_there_before_the_browser_reports_what_is_visible(small_page, open_page):
    opened = open_page(small_page)
    opened.page.add_init_script("window.IntersectionObserver = class { observe() {} disconnect() {} }")
    opened.page.reload()
    for view in ("conversation", "tokens", "prompt"):
        opened.show(f"#e=0&v={view}")
        opened.until("document.getElementById('view').textContent.includes('this?')")


def test_keys_reach_every_view(small_page, open_page):
    opened = open_page(small_page)
    press = opened.page.keyboard.press
    opened.page.wait_for_selector(".message.head")
    assert opened.texts(EPISODE)[0].startswith("episode two-turns ")
    press("j")
    opened.until(f"document.querySelector('{EPISODE}').textContent.startsWith('episode sibling ')")
    press("k")
    opened.until(f"document.querySelector('{EPISODE}').textContent.startsWith('episode two-turns ')")
    for number, name in enumerate(["conversation", "tokens", "prompt", "tree", "drift", "compare", "details"], 1):
        press(str(number))
        opened.page.wait_for_selector(f'[role="tab"][aria-selected="true"][data-view="{name}"]')
    press("2")
    press("[")
    opened.until("location.hash.includes('b=3')")
    press("c")
    opened.page.wait_for_selector(".sampled")
    press("/")
    opened.page.keyboard.type("status:error")
    press("Enter")
    opened.until("document.querySelector('h2').textContent", "windows")
    press("Escape")
    opened.until("location.hash === ''")
    press("?")
    assert "next, previous episode" in opened.texts("dialog")[0]
    press("Escape")
    before = opened.evaluate("getComputedStyle(document.body).backgroundColor")
    press("t")
    assert opened.evaluate("getComputedStyle(document.body).backgroundColor") != before
    opened.check_quiet()


def test_a_link_opens_an_episode_at_a_token(small_page, open_page):
    opened = open_page(f"{small_page.as_uri()}#e=1&v=tokens&b=3&t=40")
    opened.page.wait_for_selector(".chosen")
    assert opened.texts(EPISODE)[0].startswith("episode sibling ")
    assert opened.texts("#token dd")[2].startswith("40 of the branch")


def test_at_the_width_of_a_telephone_one_pane_is_shown_and_nothing_is_cut_off(small_page, open_page):
    opened = open_page(small_page, PHONE, "dark")
    assert opened.page.locator(".list").is_visible()
    assert not opened.page.locator(".episode").is_visible()
    opened.screenshot("phone-list")
    opened.page.locator("td.id a").first.click()
    for view in ("conversation", "tokens", "tree", "compare"):
        opened.show(f"#e=0&v={view}")
        assert not opened.page.locator(".list").is_visible()
        assert opened.evaluate("document.documentElement.scrollWidth") <= PHONE[0]
        opened.screenshot(f"phone-{view}")
    opened.page.click(".back")
    opened.page.wait_for_selector(".list >> visible=true")
    opened.check_quiet()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_serious(small_page, open_page, scheme):
    assert AXE.exists(), "run `npm ci` in rollouts/view/frontend"
    opened = open_page(small_page, scheme=scheme, bypass_csp=True)  # axe assigns markup, which the page forbids
    for view in ("conversation", "tokens", "prompt", "tree", "drift", "compare", "details"):
        opened.show(f"#e=3&v={view}")
        if view == "conversation":
            opened.evaluate(AXE.read_text("utf-8"))
        assert serious_violations(opened) == [], view


def test_500_episodes_of_30_000_tokens_open_and_scroll(large_page, open_page):
    opened = open_page(large_page)
    assert opened.texts("#count")[0].startswith("500 of 500 episodes")
    assert opened.evaluate("document.querySelectorAll('tbody tr').length") < 120
    opened.show("#e=499&v=tokens")
    opened.evaluate(SCROLL)
    assert opened.evaluate("document.querySelectorAll('.t').length") < 6000  # of 30,000
    opened.check_quiet()


# Scrolls by 250 pixels a frame for 3 seconds.
SCROLL = """() => new Promise((resolve) => {
  const view = document.getElementById("view");
  const step = (now) => {
    view.scrollTop += 250;
    if (now < end) requestAnimationFrame(step);
    else resolve();
  };
  const end = performance.now() + 3000;
  requestAnimationFrame(step);
})"""
