"""A forecast: what a run will need, estimated from a recipe, its manifests, and a small sample of each source. It runs nothing."""

from __future__ import annotations

from zephon_ray.forecast.needs import Forecast, Ranks, SourceForecast, forecast, mixture_bound
from zephon_ray.forecast.samples import Sample, sample_sources

__all__ = ["Forecast", "Ranks", "Sample", "SourceForecast", "forecast", "mixture_bound", "sample_sources"]
