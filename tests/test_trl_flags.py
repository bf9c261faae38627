"""The tables of docs/trl.md have every field of TRL's configs, and no flag that does not exist."""
import re

import pytest
from runs import ROOT, SCRIPTS

TABLES = (ROOT / "docs/trl.md").read_text().partition("\n## Departures")[0]


@pytest.mark.parametrize("config", ["DPOConfig", "KTOConfig", "RLOOConfig"])
def test_every_field_of_trl_is_in_a_table(config):
    trl = pytest.importorskip("trl")
    from transformers import TrainingArguments
    fields = getattr(trl, config).__dataclass_fields__.keys() - TrainingArguments.__dataclass_fields__.keys()
    assert len(fields) > 10 and fields <= set(re.findall(r"`(\w+)`", TABLES))


def test_every_flag_of_the_tables_exists():
    flags = {flag for script in SCRIPTS.values() for flag in script.Args.__dataclass_fields__}
    for patch in set(re.findall(r"changes/\w+\.patch", TABLES)):
        flags |= set(re.findall(r"^\+    (\w+): .* = ", (ROOT / patch).read_text(), re.M))
    assert set(re.findall(r"--(\w+)", TABLES)) <= flags
