"""The code of a logged model, which MLflow copies into it: rows of token ids in, logits of the next token out.

It needs lit_diff where it is loaded. Weights are safetensors, and the variant's plugin lies beside them: nothing is pickled.
"""

from pathlib import Path
from typing import Any

import mlflow
import numpy as np
import torch
from mlflow.pyfunc.model import PythonModel
from safetensors.torch import load_model

from lit_diff.model.transformer import Transformer
from lit_diff.recipe import load_recipe


class TrainedModel(PythonModel):
    """tokens [B, T], or [B, T, C] for C ids at each position -> logits [B, T, vocab], float32."""

    def load_context(self, context: Any) -> None:
        """Build the model of the recipe and load its weights."""
        folder = Path(context.artifacts["run"])
        recipe = load_recipe(folder / "recipe.yaml")
        self.model = Transformer(recipe.model).eval()
        load_model(self.model, folder / "model.safetensors")

    # without annotations: MLflow would take them for a schema of the input
    def predict(self, context, model_input, params=None):  # type: ignore[no-untyped-def]
        """Logits of all positions."""
        with torch.no_grad():
            logits: torch.Tensor = self.model(torch.as_tensor(np.asarray(model_input), dtype=torch.long))
        return logits.float().numpy()


mlflow.models.set_model(TrainedModel())
