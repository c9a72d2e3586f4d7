"""Fields of `logger`: what no logger can use is refused in one line, without its package."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from mprun.config import compose
from mprun.errors import UsageError
from mprun.records.run_config import OWN_TAGS


def refusal(*words: str) -> str:
    with pytest.raises(UsageError) as caught:
        compose(["recipe=linear", "logger=mlflow", *words])
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    "uri",
    [
        *("sqlite:///runs.db", "sqlite:////data/runs.db", "http://host:5000", "https://host"),
        *("postgresql://user@host/db", "mysql+pymysql://user@host/db", "databricks"),
    ],
)
def test_addresses(uri: str) -> None:
    assert (
        compose(["recipe=linear", "logger=mlflow", f"logger.uri='{uri}'"]).config.logger.uri == uri
    )


@pytest.mark.parametrize("uri", ["runs.db", "./mlruns", "file:///tmp/x", "", "sqlite", "http://[x"])
def test_what_is_no_address(uri: str) -> None:
    assert "legal: sqlite:///FILE, https://SERVER" in refusal(f"logger.uri='{uri}'")


def test_a_password_does_not_get_into_a_record() -> None:
    message = refusal("logger.uri='postgresql://me:secret@host/db'")
    assert "secret" not in message
    assert "MLFLOW_TRACKING_PASSWORD" in message


@pytest.mark.representative(0, 5)
@pytest.mark.parametrize("name", OWN_TAGS)
def test_tags_that_are_mpruns(name: str) -> None:
    assert f"logger.tags.{name}: mprun sets this tag" in refusal(f"logger.tags={{{name}: x}}")


def test_tags() -> None:
    words = ["recipe=linear", "logger=mlflow", "logger.tags.team=vision", "logger.tags.n=5"]
    assert compose(words).config.logger.tags == {"team": "vision", "n": "5"}
    assert "legal is a name of letters" in refusal("logger.tags={9a: x}")


@pytest.mark.parametrize("key", ["project", "run_name"])
def test_names(key: str) -> None:
    assert "legal is a name of at most 128" in refusal(f"logger.{key}=''")
    assert "legal is a name of at most 128" in refusal(f"logger.{key}={'x' * 129}")


def test_a_mode() -> None:
    assert "logger.mode is one of offline, online" in refusal("logger.mode=onlin")


def test_the_folder_of_a_resumed_run_does_not_decide_where_figures_go() -> None:
    resolved = compose(["recipe=linear", "logger=mlflow", "logger.uri='http://other'"]).resolved
    folder = Path("run")
    folder.mkdir()
    (folder / "config.yaml").write_text(yaml.safe_dump(resolved))
    with pytest.raises(UsageError, match=r"add run\.trust=true, else logger\.uri=null"):
        compose(["run.resume=run"])
    assert compose(["run.resume=run", "run.trust=true"]).config.logger.uri == "http://other"
    assert compose(["run.resume=run", "logger.uri=null"]).config.logger.uri is None
