"""The demo: a real instruct model that installs from a package registry, and its warm-up."""

from shadowmask.demo.model import MissingDemoModelError, load_demo_model
from shadowmask.demo.warmup import WarmupRecipe, load_warm_model, warm_up

__all__ = [
    "MissingDemoModelError",
    "WarmupRecipe",
    "load_demo_model",
    "load_warm_model",
    "warm_up",
]
