"""Log results of `quire bench serve` to MLflow or to Weights & Biases, one run for each file.

    quire bench serve --num-prompts 200 --request-rate 4 --save-result --result-filename rate-4.json
    pip install mlflow-skinny wandb
    python examples/log_benchmark.py --to mlflow rate-4.json      # MLFLOW_TRACKING_URI: where to
    python examples/log_benchmark.py --to wandb rate-4.json       # WANDB_MODE=offline: to a folder

Numbers of the file are metrics of the run; its texts, such as the model, are parameters.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

EXPERIMENT = "quire bench"


def to_mlflow(name: str, file: Path, parameters: dict[str, Any], metrics: dict[str, float]) -> None:
    """Log a run, with the file as an artifact."""
    import mlflow

    mlflow.set_experiment(EXPERIMENT)
    with mlflow.start_run(run_name=name):
        mlflow.log_params(parameters)
        mlflow.log_metrics(metrics)
        mlflow.log_artifact(str(file))


def to_wandb(name: str, file: Path, parameters: dict[str, Any], metrics: dict[str, float]) -> None:
    """Log a run, with the file beside it."""
    import wandb

    with wandb.init(project=EXPERIMENT.replace(" ", "-"), name=name, config=parameters) as run:
        run.summary.update(metrics)
        run.save(str(file), base_path=str(file.parent), policy="now")


def main() -> None:
    """Log the files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path, help="results of `quire bench serve --save-result`")
    parser.add_argument("--to", choices=("mlflow", "wandb"), required=True, help="where to log them")
    given = parser.parse_args()
    for file in given.files:
        result: dict[str, Any] = json.loads(file.read_text())
        metrics = {key: float(value) for key, value in result.items() if type(value) in (int, float)}
        parameters = {key: value for key, value in result.items() if isinstance(value, str)}
        (to_mlflow if given.to == "mlflow" else to_wandb)(file.stem, file.resolve(), parameters, metrics)
        print(f"{file}: {len(metrics)} metrics, {len(parameters)} parameters")


if __name__ == "__main__":
    main()
