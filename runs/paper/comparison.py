"""The paper's tables 1 to 8 beside ours: rows of text, and under each table what was not run and how to run it."""

from runs.paper import language_tables, published, vision_tables
from runs.paper.measured import Sources

__all__ = ["BUILDERS", "Sources"]
NAMES = {
    "related_methods": vision_tables.related_methods,
    "main_results": vision_tables.main_results,
    "efficiency": vision_tables.efficiency,
    "runtime": vision_tables.runtime,
    "ablation": vision_tables.ablation,
    "bpb": language_tables.bpb,
    "core_subset": language_tables.core_subset,
    "compute": language_tables.compute,
}
BUILDERS = {published.TABLES[name]["number"]: builder for name, builder in NAMES.items()}
