"""Claims: between processes, ended by death, and of one job at a time."""

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from data.claims import JOB, MANIFEST_CLAIM, Claims


def in_a_child(folder: Path, act: Callable[[Claims], bytes]) -> bytes:
    """What `act` returns in another process, which then dies by SIGKILL."""
    reader, writer = os.pipe()
    if os.fork() == 0:
        os.write(writer, act(Claims(folder)))
        os.kill(os.getpid(), signal.SIGKILL)
    os.close(writer)
    os.wait()
    with os.fdopen(reader, "rb") as file:
        return file.read()


def test_a_claim_holds_between_processes_and_ends_with_its_process(tmp_path: Path) -> None:
    def takes(*places: int) -> Callable[[Claims], bytes]:
        return lambda claims: bytes(claims.take(place) for place in places)

    with Claims(tmp_path) as claims:
        assert claims.take(3) and claims.take(MANIFEST_CLAIM)
        assert in_a_child(tmp_path, takes(0, 3, MANIFEST_CLAIM, 2)) == bytes([True, False, False, True])
        assert claims.take(0) and claims.take(2), "the dead process holds nothing"
        claims.release(3)
        assert in_a_child(tmp_path, takes(3)) == bytes([True])


def test_processes_of_one_job_work_together_and_others_are_refused_while_they_live(tmp_path: Path) -> None:
    def joins(job: str) -> Callable[[Claims], bytes]:
        def act(claims: Claims) -> bytes:
            try:
                claims.join(job)
            except ValueError as error:
                return str(error).encode()
            return b"joined"

        return act

    assert in_a_child(tmp_path, joins("first")) == b"joined"
    with Claims(tmp_path) as claims:
        claims.join("second, longer than the first")
        assert in_a_child(tmp_path, joins("second, longer than the first")) == b"joined"
        assert b"other responses or options work on it now" in in_a_child(tmp_path, joins("first"))
        assert in_a_child(tmp_path, lambda other: bytes([other.take(JOB)])) == bytes([False]), "not alone"
    assert in_a_child(tmp_path, joins("first")) == b"joined"


def test_a_folder_that_cannot_be_written_to_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"store=.*/file cannot be written to .*choose another store="):
        Claims(tmp_path / "file")


def test_a_claim_file_that_was_replaced_is_noticed(tmp_path: Path) -> None:
    with Claims(tmp_path) as claims:
        assert claims.is_current()
        (tmp_path / ".claims").unlink()
        assert not claims.is_current()
        (tmp_path / ".claims").touch()
        assert not claims.is_current()
