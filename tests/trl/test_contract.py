"""TRL is what we rely on, and a TRL that is not says so in one line."""

from __future__ import annotations

import importlib.metadata

import pytest

from shadowmask.trl.contract import METHODS, SUPPORTED, check_trl_version, contract_violations
from trl import GRPOTrainer


def test_the_installed_trl_keeps_the_contract() -> None:
    assert contract_violations() == []


@pytest.mark.parametrize("name", METHODS)
def test_a_method_that_is_gone_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(GRPOTrainer, name)
    assert any(f"GRPOTrainer.{name} is gone" in line for line in contract_violations())


def test_a_changed_signature_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GRPOTrainer, "_compute_loss", lambda self, inputs: None)
    assert any("_compute_loss takes ('self', 'inputs')" in line for line in contract_violations())


@pytest.mark.parametrize("version", ["1.15.2", "1.17.0", "2.0.0", "0.29.1"])
def test_another_version_is_refused_with_the_remedy(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda _: version)
    with pytest.raises(ImportError, match=rf"TRL {version} .*pip install 'trl>=1.16,<1.17'"):
        check_trl_version()


@pytest.mark.parametrize("version", ["1.16.0", "1.16.3", "1.16.0.dev0", "1.16.1rc1"])
def test_patch_versions_are_accepted(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda _: version)
    check_trl_version()
    assert SUPPORTED == ((1, 16), (1, 17))


def test_a_missing_trl_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    with pytest.raises(ImportError, match=r"pip install 'shadowmask\[trl\]'"):
        check_trl_version()
