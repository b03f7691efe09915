"""Reports in a real Chromium: nothing is requested, hostile texts do nothing, links lead into the viewer."""

import os
import shutil
import sys
from pathlib import Path

import pytest
from chromium import AXE, PHONE, serious_violations

from rollouts.report import write_report

sys.path.append(str(Path(__file__).parents[1] / "report"))

from report_runs import HOSTILE, failing_run, hostile_run, trained_run

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def reported(tmp_path_factory):
    """The reports of three directories by name."""
    directory = tmp_path_factory.mktemp("reports")
    runs = {"trained": trained_run, "failing": failing_run, "hostile": hostile_run}
    return {name: write_report(make(directory / name)).path for name, make in runs.items()}


def check(opened, name):
    assert opened.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert opened.evaluate("[...document.images].every(image => image.complete && image.naturalWidth > 0)")
    opened.screenshot(f"report-{name}")
    opened.check_quiet()


@pytest.mark.contract
def test_a_report_is_quiet_and_a_link_leads_to_the_episode_in_the_viewer(reported, open_page):
    opened = open_page(reported["trained"])
    assert opened.page.locator("figure.chart svg").count() >= 12
    bars = opened.evaluate("[...document.querySelectorAll('.bar')].filter(bar => bar.getBBox().height > 20).length")
    assert bars >= 2
    check(opened, "trained")
    link = opened.page.locator("td a").first
    name = link.inner_text()
    link.click()
    opened.page.wait_for_selector("#view:not(:empty)")
    assert f"episode {name} " in opened.texts(".episodehead .facts")[0]


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", ["trained", "failing"])
def test_axe_finds_nothing_serious_in_a_report(reported, open_page, name, scheme):
    opened = open_page(reported[name], scheme=scheme, bypass_csp=True)
    opened.evaluate("document.querySelectorAll('details').forEach(each => { each.open = true })")
    opened.evaluate(AXE.read_text("utf-8"))
    assert serious_violations(opened) == []


def test_no_word_of_a_table_is_divided(reported, open_page):
    opened = open_page(reported["failing"])
    words = "[...document.querySelectorAll('th, td code')].filter(cell => !cell.textContent.includes(' '))"
    assert opened.evaluate(f"{words}.length") > 0
    select = "const range = document.createRange(); range.selectNodeContents(cell)"
    lines = f"(cell => {{ {select}; return range.getClientRects().length }})"
    assert opened.evaluate(f"{words}.filter(cell => {lines}(cell) > 1).map(cell => cell.textContent)") == []


@pytest.mark.parametrize("name", ["trained", "failing", "hostile"])
def test_at_the_width_of_a_telephone_nothing_of_a_report_is_cut_off(reported, open_page, name):
    check(open_page(reported[name], PHONE, "dark"), f"{name}-phone")


def test_markup_in_the_texts_of_a_run_does_nothing(reported, open_page):
    opened = open_page(reported["hostile"])
    assert opened.evaluate("window.attacked") is None
    assert opened.evaluate("document.querySelectorAll('iframe, form, base, script').length") == 0
    shown = opened.evaluate("document.body.textContent + document.title")
    assert "<script>window.attacked = 1</script>" in shown
    assert [ascii(character) for character in HOSTILE.invisible if character in shown] == []
    opened.check_quiet()


@pytest.mark.skipif("MMROLLOUTS_DEMO_OUT" not in os.environ, reason="needs the output of `rollouts demo`")
def test_the_report_that_the_demonstration_wrote_opens(tmp_path, open_page):
    for name in ("report.html", "viewer.html"):
        shutil.copy(Path(os.environ["MMROLLOUTS_DEMO_OUT"]) / name, tmp_path / name)
    opened = open_page(tmp_path / "report.html")
    for title in ("values: reward", "values: loss", "values: tokens after image"):
        assert title in opened.texts("summary"), title
    assert (tmp_path / "report.html").stat().st_size < 300_000
    check(opened, "demo")
