from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from textwrap import dedent
from typing import Any, Literal

import numpy as np
import pytest

from stoker.config import schema
from stoker.rl.rewards import RewardSuite, build
from stoker.rl.types import Prompt, Sample, SamplingParams


@pytest.fixture
def sample() -> Callable[..., Sample]:
    """sample(text, answer=None, ...): a finished sample with one token a character."""

    def make(
        text: str,
        answer: str | None = None,
        *,
        index: int = 0,
        content: str | Sequence[Mapping[str, Any]] = "What is it?",
        columns: Mapping[str, Any] | None = None,
        finish: Literal["stop", "length"] = "stop",
        prompt_id: str = "data:3",
    ) -> Sample:
        ids = np.frombuffer(text.encode(), np.uint8).astype(np.int32)
        return Sample(
            prompt=Prompt(
                id=prompt_id,
                token_ids=(1, 2),
                content=content if isinstance(content, str) else tuple(content),
                answer=answer,
                columns=columns or {},
                source="data",
            ),
            index=index,
            params=SamplingParams(),
            weight_version=0,
            token_ids=ids,
            logprobs=np.zeros(len(ids), np.float32),
            text=text,
            finish=finish,
        )

    return make


@pytest.fixture
def suite() -> Iterator[Callable[..., RewardSuite]]:
    """suite(dict(function=...), ...): built, and closed after the test."""
    made: list[RewardSuite] = []

    def make(*rewards: dict[str, Any]) -> RewardSuite:
        made.append(build([schema.Reward(**reward) for reward in rewards]))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str], str]:
    """write(source): the path of a new file with that Python source."""

    def make(source: str) -> str:
        file = tmp_path / f"mine{len(list(tmp_path.iterdir()))}.py"
        file.write_text(dedent(source))
        return str(file)

    return make
