"""The page of settings says what the models say, and its example is one."""

from __future__ import annotations

import re
from pathlib import Path

from settings_page import PAGE, render

from pagedkv.server.layers import SECTIONS, load_settings
from pagedkv.server.settings import PublicPrefix, SloClass, TenantSettings


def test_the_page_is_that_of_the_models() -> None:
    assert PAGE.read_text() == render(), "run python tests/docs/settings_page.py"


def test_every_setting_has_a_meaning() -> None:
    for model in (*SECTIONS.values(), TenantSettings, SloClass, PublicPrefix):
        for name, field in model.model_fields.items():
            assert field.description and field.description.endswith("."), name


def test_the_example_can_be_read(tmp_path: Path) -> None:
    [example] = re.findall(r"```toml\n(.*?)```", PAGE.read_text(), re.S)
    (tmp_path / "serve.toml").write_text(example)
    settings = load_settings(tmp_path / "serve.toml", {}, {}).settings
    assert settings.slo_of("alice").ttft_slo_ms == 500
