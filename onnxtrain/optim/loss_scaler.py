"""Factors for the loss, so that small gradients do not vanish in half precision."""

from __future__ import annotations

from onnxtrain.optim.step_info import TrainStepInfo


class LossScaler:
    """A scale that its subclass changes.

    Args:
        loss_scale: the first scale.

    Raises:
        ValueError: it is not above 0.
    """

    def __init__(self, loss_scale: float) -> None:
        if not loss_scale > 0:
            raise ValueError(f"loss_scale is {loss_scale!r}; expected a number above 0.")
        self.loss_scale = float(loss_scale)
        self._first = float(loss_scale)

    def reset(self) -> None:
        """Goes back to the first scale."""
        self.loss_scale = self._first

    def update(self, train_step_info: TrainStepInfo) -> float:
        """The scale for the next step, by what happened in this one."""
        raise NotImplementedError("a subclass of LossScaler says how the scale changes")


class DynamicLossScaler(LossScaler):
    """Halves the scale after an overflow, doubles it after a window of steps without one.

    Args:
        automatic_update: whether `update` changes the scale.
        loss_scale: the first scale.
        up_scale_window: steps without overflow before it is doubled.
        min_loss_scale: it does not fall below.
        max_loss_scale: it does not rise above.

    Raises:
        ValueError: a number that is out of its range.
    """

    def __init__(
        self,
        automatic_update: bool = True,
        loss_scale: float = 1 << 16,
        up_scale_window: int = 2000,
        min_loss_scale: float = 1.0,
        max_loss_scale: float = 1 << 24,
    ) -> None:
        super().__init__(loss_scale)
        if up_scale_window < 1:
            raise ValueError(f"up_scale_window is {up_scale_window!r}; expected 1 or more.")
        if not 0 < min_loss_scale <= loss_scale <= max_loss_scale:
            raise ValueError(
                f"loss_scale is {loss_scale}; expected between min_loss_scale {min_loss_scale} and "
                f"max_loss_scale {max_loss_scale}, all above 0."
            )
        self.automatic_update = automatic_update
        self.up_scale_window = up_scale_window
        self.min_loss_scale = float(min_loss_scale)
        self.max_loss_scale = float(max_loss_scale)
        self._without_overflow = 0

    def reset(self) -> None:
        """Goes back to the first scale, and counts the window anew."""
        super().reset()
        self._without_overflow = 0

    def update(self, train_step_info: TrainStepInfo) -> float:
        """The scale for the next step, by whether the gradients of this one were all finite."""
        if not self.automatic_update:
            return self.loss_scale
        if not train_step_info.all_finite:
            self._without_overflow = 0
            self.loss_scale = max(self.min_loss_scale, self.loss_scale / 2)
            return self.loss_scale
        self._without_overflow += 1
        if self._without_overflow >= self.up_scale_window:
            self._without_overflow = 0
            self.loss_scale = min(self.max_loss_scale, self.loss_scale * 2)
        return self.loss_scale
