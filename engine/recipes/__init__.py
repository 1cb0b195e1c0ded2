"""The paper's settings as functions of the batch size (appendix A.5), by name: PIPELINE_BACKBONE[_agvm]_OPTIMIZER.

`load` reads a JSON and `filling` completes it; the other modules hold the rules.
"""

from engine.recipes.recipe import Recipe, find_recipe, recipe_names
from engine.recipes.setting import Setting

__all__ = ["Recipe", "Setting", "find_recipe", "recipe_names"]
