"""What a vision run reports in words, and which of its evaluations may be the best."""

from typing import Any

EVAL_KEYS = ("epoch", "images", "broken")  # what an evaluation's record must have to count, beside its metric
ACCURACY_KEYS = ("top1", "top5", "loss", "ema_top1", "ema_top5", "ema_loss", "images", "broken")
BROKEN_SHARE = 0.01  # of the validation images


def trusted(records: list[dict[str, Any]], *others: dict[str, Any]) -> list[dict[str, Any]]:
    """The evaluations among `records` that may be the best.

    Files that are broken for good are left out of every evaluation. One that left out many more than the evaluation
    that read the most (`others` count too) met a trouble that will pass.
    """
    fewest = min((record["broken"] for record in [*records, *others]), default=0)
    return [
        record
        for record in records
        if record["broken"] - fewest <= BROKEN_SHARE * (record["images"] + record["broken"])
    ]


def accuracy_text(values: dict[str, Any]) -> str:
    """Accuracy and loss on the validation images, of the raw weights and, in the same order, of the average.

    And how many images could not be judged.
    """
    text = f"top-1 {values['top1']:.2f} top-5 {values['top5']:.2f} loss {values['loss']:.3f}"
    if "ema_top1" in values:
        text += f" | EMA {values['ema_top1']:.2f} {values['ema_top5']:.2f} {values['ema_loss']:.3f}"
    return text + (f" | on {values['images']:,} images, {values['broken']} more are broken" if values["broken"] else "")


def epoch_text(values: dict[str, Any], speed: dict[str, float], sigma: dict[str, list[float]]) -> str:
    """What an epoch's line says in 130 columns; the rest is in log.jsonl.

    Accuracy and loss, how far the bandwidths spread, and the speed.
    """
    heads = [value for layer in sigma.values() for value in layer]
    text = accuracy_text(values) + (f" | sigma {min(heads):.2f}-{max(heads):.2f}" if heads else "")
    return text + (f" | {speed['images_per_second']:,.0f} img/s" if speed["images_per_second"] else "")
