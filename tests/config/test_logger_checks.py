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


NO_ADDRESS = ("runs.db", "./mlruns", "file:///tmp/x", "", "sqlite", "http://[x")
REFUSED = {
    **{f"uri='{uri}'": "legal: sqlite:///FILE, https://SERVER" for uri in NO_ADDRESS},
    **{f"tags={{{name}: x}}": f"tags.{name}: mprun sets this tag" for name in OWN_TAGS},
    "tags={9a: x}": "legal is a name of letters",
    "project=''": "legal is a name of at most 128",
    f"run_name={'x' * 129}": "legal is a name of at most 128",
    "mode=onlin": "logger.mode is one of offline, online",
}


def test_what_no_logger_can_use_is_refused() -> None:
    for field, message in REFUSED.items():
        assert message in refusal(f"logger.{field}"), field


def test_a_password_does_not_get_into_a_record() -> None:
    message = refusal("logger.uri='postgresql://me:secret@host/db'")
    assert "secret" not in message
    assert "MLFLOW_TRACKING_PASSWORD" in message


def test_tags() -> None:
    words = ["recipe=linear", "logger=mlflow", "logger.tags.team=vision", "logger.tags.n=5"]
    assert compose(words).config.logger.tags == {"team": "vision", "n": "5"}


def test_the_folder_of_a_resumed_run_does_not_decide_where_figures_go() -> None:
    resolved = compose(["recipe=linear", "logger=mlflow", "logger.uri='http://other'"]).resolved
    folder = Path("run")
    folder.mkdir()
    (folder / "config.yaml").write_text(yaml.safe_dump(resolved))
    with pytest.raises(UsageError, match=r"add run\.trust=true, else logger\.uri=null"):
        compose(["run.resume=run"])
    assert compose(["run.resume=run", "run.trust=true"]).config.logger.uri == "http://other"
    assert compose(["run.resume=run", "logger.uri=null"]).config.logger.uri is None
