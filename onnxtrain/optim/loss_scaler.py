"""Loss scaling, which keeps small gradients from underflowing in half precision."""

from __future__ import annotations

from onnxtrain.optim.step_info import TrainStepInfo


class LossScaler:
    """The base class of loss scalers.

    Args:
        loss_scale: the initial scale.

    Raises:
        ValueError: `loss_scale` is not positive.
    """

    def __init__(self, loss_scale: float) -> None:
        if not loss_scale > 0:
            raise ValueError(f"loss_scale is {loss_scale!r}; expected a number > 0.")
        self.loss_scale = float(loss_scale)
        self._initial = float(loss_scale)

    def reset(self) -> None:
        """Reset to the initial scale."""
        self.loss_scale = self._initial

    def update(self, train_step_info: TrainStepInfo) -> float:
        """Return the scale for the next step."""
        raise NotImplementedError("LossScaler.update is abstract: subclass LossScaler and override it")


class DynamicLossScaler(LossScaler):
    """Halve the scale after an overflow; double it after a window of steps without one.

    Args:
        automatic_update: whether `update` changes the scale.
        loss_scale: the initial scale.
        up_scale_window: the number of steps without overflow before the scale doubles.
        min_loss_scale: the lower bound of the scale.
        max_loss_scale: the upper bound of the scale.

    Raises:
        ValueError: an argument is out of range.
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
            raise ValueError(f"up_scale_window is {up_scale_window!r}; expected an integer >= 1.")
        if not 0 < min_loss_scale <= loss_scale <= max_loss_scale:
            raise ValueError(
                f"loss_scale is {loss_scale}; expected min_loss_scale ({min_loss_scale}) <= loss_scale <= "
                f"max_loss_scale ({max_loss_scale}), all > 0."
            )
        self.automatic_update = automatic_update
        self.up_scale_window = up_scale_window
        self.min_loss_scale = float(min_loss_scale)
        self.max_loss_scale = float(max_loss_scale)
        self._steps_without_overflow = 0

    def reset(self) -> None:
        """Reset to the initial scale and restart the window."""
        super().reset()
        self._steps_without_overflow = 0

    def update(self, train_step_info: TrainStepInfo) -> float:
        """Return the scale for the next step, from whether all gradients of this step were finite."""
        if not self.automatic_update:
            return self.loss_scale
        if not train_step_info.all_finite:
            self._steps_without_overflow = 0
            self.loss_scale = max(self.min_loss_scale, self.loss_scale / 2)
            return self.loss_scale
        self._steps_without_overflow += 1
        if self._steps_without_overflow >= self.up_scale_window:
            self._steps_without_overflow = 0
            self.loss_scale = min(self.max_loss_scale, self.loss_scale * 2)
        return self.loss_scale
