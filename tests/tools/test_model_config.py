"""Configurations of models."""

import json
from pathlib import Path

from epd.tools.model_config import config_path, read_config


def test_the_configuration_of_a_folder_is_its_file(tmp_path: Path) -> None:
    assert read_config(config_path(str(tmp_path), None, {})) is None
    file = tmp_path / "config.json"
    for text, expected in (("{", None), ("[]", None), ('{"a": 1}', {"a": 1}), ("\xff", None)):
        file.write_bytes(text.encode("latin-1"))
        assert read_config(config_path(str(tmp_path), None, {})) == expected


def test_the_hub_is_queried_only_for_names_of_the_hub(tmp_path: Path) -> None:
    asked = []
    (tmp_path / "config.json").write_text(json.dumps({"a": 1}))

    def fetched(model: str, revision: str | None) -> Path:
        asked.append((model, revision))
        return tmp_path / "config.json"

    assert read_config(config_path("s3://bucket/model", None, {}, fetched)) is None
    assert (
        read_config(config_path("a/model", None, {"VLLM_USE_MODELSCOPE": "True"}, fetched)) is None
    )
    assert read_config(config_path("a/model", "b", {}, fetched)) == {"a": 1}
    assert asked == [("a/model", "b")]
