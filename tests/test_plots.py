"""Pictures hold what was measured, as text and marks of an SVG that is the same every time."""

from typing import Any
from xml.etree import ElementTree

import numpy as np

from eval.calibrate import Form, Recorded, assess, fit_scaling
from eval.plots import reliability_diagram


def calibration_of(*, calibrated: bool) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    confidence = rng.random((400, 3))
    survived = np.cumprod(rng.random((400, 3)) < confidence**2, axis=1).astype(np.float64)
    rounds = Recorded(confidence, survived, np.ones_like(survived, dtype=bool))
    after = assess(rounds, fit_scaling(rounds, Form.full)).to_dict() if calibrated else None
    return {"before": assess(rounds).to_dict(), "after": after}


def texts_of(svg: str) -> list[str]:
    return [element.text for element in ElementTree.fromstring(svg).iter() if element.tag.endswith("text")]  # type: ignore[misc]


def test_a_reliability_diagram_has_a_panel_a_draft_with_both_errors() -> None:
    calibration = calibration_of(calibrated=True)
    texts = texts_of(reliability_diagram(calibration))
    for slot in range(3):
        assert f"draft {slot + 1}" in texts
        for name in ("before", "after"):
            assert f"{name}, ECE {100 * calibration[name]['ece'][slot]:.1f} %" in texts
    assert reliability_diagram(calibration) == reliability_diagram(calibration)


def test_without_a_calibration_only_the_confidences_as_they_are_stand_there() -> None:
    texts = texts_of(reliability_diagram(calibration_of(calibrated=False)))
    assert not any(text.startswith("after") for text in texts)
    assert sum(text.startswith("before") for text in texts) == 3
