"""Artifacts are whole or absent, and built once."""

import pytest

from shadowmask.demo.artifacts import build_once, cache_root


def write_content(directory):
    (directory / "content").write_text("whole")


def test_the_second_request_builds_nothing(cache):
    first = build_once("thing", write_content)
    second = build_once("thing", lambda directory: pytest.fail("built again"))
    assert first == second == cache / "thing"
    assert (second / "content").read_text() == "whole"
    assert [path.name for path in cache.iterdir()] == ["thing"]


@pytest.mark.parametrize("interruption", [ValueError, KeyboardInterrupt])
def test_an_interrupted_build_leaves_nothing_and_can_be_repeated(cache, interruption):
    def break_off(directory):
        write_content(directory)
        raise interruption

    with pytest.raises(interruption):
        build_once("thing", break_off)
    assert not list(cache.iterdir())
    assert (build_once("thing", write_content) / "content").exists()


def test_the_slower_of_two_processes_takes_the_copy_of_the_faster(cache):
    def overtaken(directory):
        build_once("thing", write_content)
        (directory / "content").write_text("late")

    assert (build_once("thing", overtaken) / "content").read_text() == "whole"
    assert [path.name for path in cache.iterdir()] == ["thing"]


def test_an_unusable_cache_directory_is_named_with_the_way_out(tmp_path, monkeypatch):
    blocker = tmp_path / "file"
    blocker.touch()
    monkeypatch.setenv("SHADOWMASK_CACHE", str(blocker / "cache"))
    with pytest.raises(OSError, match=r"file/cache .*SHADOWMASK_CACHE"):
        cache_root()


def test_the_default_is_in_the_home_directory(tmp_path, monkeypatch):
    monkeypatch.delenv("SHADOWMASK_CACHE", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_root() == tmp_path / ".cache" / "shadowmask"
