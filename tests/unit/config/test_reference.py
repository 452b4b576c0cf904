# SPDX-License-Identifier: Apache-2.0
from pathlib import Path

from rbln_vllm import envs
from rbln_vllm.config.flags import flagged_fields
from rbln_vllm.config.options import flag_of
from rbln_vllm.config.reference import render
from rbln_vllm.config.schema import CONFIG_CLASSES
from rbln_vllm.devices import PROFILES
from tests.unit.markdown import assert_rows_fit

PAGE = Path(__file__).parents[3] / "docs" / "options.md"


def test_the_page_is_what_the_code_says() -> None:
    assert PAGE.read_text() == render(), (
        "run: python -m rbln_vllm.config.reference > docs/options.md"
    )


def test_the_page_names_everything() -> None:
    page = render()
    fields = [name for cls in CONFIG_CLASSES.values() for name in cls.model_fields]
    flags = [flag_of(name) for name, _ in flagged_fields()]
    names = [row.name for row in envs.REGISTRY]
    for name in [*fields, *flags, *names, *PROFILES]:
        assert f"`{name}`" in page


def test_every_table_row_has_the_columns_of_its_header() -> None:
    assert_rows_fit(render())
