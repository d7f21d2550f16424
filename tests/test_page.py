"""The page of a report: opened in a browser it shows what was measured, without an error and without a request."""

import os
import shutil
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, ViewportSize, sync_playwright

from eval.html import render_page
from models.checkpoint import save_drafter
from models.dflash import DFlash
from models.dspark import DSpark
from models.files import read_json
from models.target import TargetIdentity
from tests.test_scripts import Script, prompts_file, script  # noqa: F401 (fixtures)

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
PHONE, DESKTOP = ViewportSize(width=380, height=800), ViewportSize(width=1280, height=900)
SECTIONS = ["result", "replay", "positions", "tasks", "why", "lossless", "speed", "confidence", "words"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the run; filled once."""
    return tmp_path_factory.mktemp("page")


@pytest.fixture
def run(
    script: Script,
    prompts_file: Path,
    folder: Path,
    tiny_dspark: DSpark,
    tiny_dflash: DFlash,
    tiny_identity: TargetIdentity,
) -> Path:
    """An eval folder with everything that a report can have."""
    if not (folder / "eval").exists():
        for name, drafter in (("dspark", tiny_dspark), ("dflash", tiny_dflash)):
            save_drafter(drafter, folder / name, target=asdict(tiny_identity))
        tasks = []
        for name in ("sums", "counts"):
            tasks.append(str(shutil.copy(prompts_file, folder / f"{name}.jsonl")))
        script(
            "eval",
            f"output_dir={folder}",
            f"draft={folder / 'dspark'}",
            f"compare=[{folder / 'dflash'}]",
            f"tasks=[{','.join(tasks)}]",
            "num_prompts=6",
            "max_new_tokens=16",
            "batch_size=4",
            "temperature=[0,1]",
            "lossy_sweep=[0.5,0.1]",
            "num_draft_tokens=auto",
            "check_transformers=1",
            "calibrate.enabled=true",
            "calibrate.num_prompts=8",
            "simulate.enabled=true",
            "simulate.loads=[1,2]",
            "simulate.num_rounds=20",
        )
    return folder / "eval"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    if CHROMIUM is None:
        if os.environ.get("CI") == "true":
            pytest.fail("no Chromium: .ci/run installs it")
        pytest.skip("no Chromium found; on Debian: apt-get install chromium")
    with sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield found
        found.close()


def opened(browser: Browser, path: Path, viewport: ViewportSize, scheme: Any) -> tuple[Page, list[str]]:
    """The page, and what went wrong on it: console messages of weight, errors, requests for anything but the file."""
    page = browser.new_page(viewport=viewport, color_scheme=scheme)
    trouble: list[str] = []
    page.on("console", lambda message: trouble.append(message.text) if message.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: trouble.append(str(error)))
    page.on("request", lambda request: trouble.append(request.url) if request.url != path.as_uri() else None)
    page.goto(path.as_uri())
    return page, trouble


def colour(page: Page, selector: str, what: str) -> tuple[int, ...]:
    text = page.eval_on_selector(selector, f"e => getComputedStyle(e).{what}")
    return tuple(int(float(part)) for part in text[text.index("(") + 1 : -1].split(",")[:3])


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("viewport", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_it_opens_without_an_error_or_a_request_and_fits(
    browser: Browser, run: Path, viewport: ViewportSize, scheme: str, tmp_path: Path
) -> None:
    page, trouble = opened(browser, run / "report.html", viewport, scheme)
    assert page.locator("main > section").evaluate_all("all => all.map(one => one.id)") == SECTIONS
    assert page.evaluate("document.scrollingElement.scrollWidth") <= viewport["width"], "it scrolls sideways"
    assert page.locator("figure svg").count() >= 12
    for picture in page.locator("figure svg").all():
        box = picture.bounding_box()
        assert box is not None and box["width"] > 200 and box["height"] > 60
    ids = page.evaluate("[...document.querySelectorAll('[id]')].map(one => one.id)")
    assert len(ids) == len(set(ids))
    paper, ink = colour(page, "body", "backgroundColor"), colour(page, "body", "color")
    axis = colour(page, "#conditional-0-text_1 text", "fill")
    assert (sum(paper) > sum(ink)) == (scheme == "light") and axis == ink
    page.screenshot(path=tmp_path / "page.png", full_page=True)
    assert (tmp_path / "page.png").stat().st_size > 50_000
    page.click("#theme")
    assert (sum(colour(page, "body", "backgroundColor")) > sum(colour(page, "body", "color"))) == (scheme == "dark")
    assert not trouble


def test_it_says_what_the_report_holds(browser: Browser, run: Path) -> None:
    report = read_json(run / "report.json")
    page, _ = opened(browser, run / "report.html", DESKTOP, "light")
    rows = page.locator("#result table tbody tr").all_inner_texts()
    assert len(rows) == len(report["rows"])
    for shown, row in zip(rows, report["rows"], strict=True):
        cells = shown.split("\t")
        assert cells[0].split(",")[0] == row["drafter"] and cells[3] == f"{row['acceptance_length']:.2f}"
        assert ("LOSSY" in cells[-1]) == (not row["lossless"])
    text = page.inner_text("main")
    (one,) = [c for c in report["comparisons"] if c["other"] == "dflash" and c["temperature"] == 1]
    assert f"{one['difference']:+.2f}" in text and ("the difference is real" in text or "may be chance" in text)
    for finding in report["findings"][0]["findings"]:
        assert finding["cause"] in text and finding["evidence"] in text
    altered = [one["altered_share"] for one in report["lossy_sweep"]]
    assert altered[0] is None and all(f"{value:.1%}" in text for value in altered[1:])


def test_one_prompt_is_replayed_at_measured_speed(browser: Browser, run: Path) -> None:
    lanes = read_json(run / "report.json")["replay"]["lanes"]
    page, trouble = opened(browser, run / "report.html", DESKTOP, "light")
    texts = page.locator(".lane .text").all_inner_texts()
    assert len(texts) == len(lanes) == 4 and len(set(texts)) == 1, "greedy and lossless: one text"
    assert page.locator(".waiting").count() == 0, "at first all of it is there, as on paper"
    page.clock.install()
    page.click("#play")
    end = max(lane["seconds"] for lane in lanes)
    for part in (0.3, 0.7):
        page.clock.run_for(int(1000 * part * end) - int(page.evaluate("performance.now()")) % 1)
        hidden = page.locator(".lane").evaluate_all("all => all.map(o => o.querySelectorAll('.waiting').length)")
        now = float(page.inner_text("#clock").split()[0])
        late = [sum(step["at_seconds"] > now + 0.1 for step in lane["steps"]) for lane in lanes]
        assert all(count >= few for count, few in zip(hidden, late, strict=True))
    page.clock.run_for(int(2000 * end) + 500)
    assert page.locator(".waiting").count() == 0 and not trouble


def test_it_prints(browser: Browser, run: Path, tmp_path: Path) -> None:
    page, trouble = opened(browser, run / "report.html", DESKTOP, "dark")
    page.emulate_media(media="print")
    assert sum(colour(page, "body", "backgroundColor")) > sum(colour(page, "body", "color")), "paper is white"
    assert not page.is_visible("nav") and not page.is_visible("#play")
    page.pdf(path=tmp_path / "page.pdf")
    assert (tmp_path / "page.pdf").read_bytes().startswith(b"%PDF") and not trouble


def test_what_prompts_and_models_say_is_text_and_not_markup(run: Path) -> None:
    report = read_json(run / "report.json")
    evil = "<script>$alert(1)$</script>"
    report["replay"]["question"] = report["comparisons"][0]["other"] = evil
    report["missing_tasks"] = [evil]
    report["replay"]["lanes"][0]["steps"][0]["tokens"][0][0] = evil
    report["rows"][1]["drafter"] = evil  # in pictures, too
    page = render_page(report)
    assert evil not in page and page.count("&lt;script&gt;$alert(1)$") >= 6


def test_a_report_of_plain_decoding_alone_is_a_page_too(
    browser: Browser,
    script: Script,
    prompts_file: Path,
    tmp_path: Path,
) -> None:
    common = [f"output_dir={tmp_path}", "draft=vanilla", f"tasks=[{prompts_file}]", "num_prompts=2", "max_new_tokens=4"]
    script("eval", *common, "replay=null", "check_transformers=0")
    page, trouble = opened(browser, tmp_path / "eval" / "report.html", PHONE, "light")
    assert "No lossless drafter was measured" in page.inner_text("main") and not trouble
