"""The parts of the trainer that preceded ORTModule: configs, schedules, loss scaler."""

from onnxruntime.training import TrainStepInfo, amp, optim

config = optim.AdamConfig(
    params=[{"params": ["bias"], "alpha": 0.9, "beta": 0.999, "lambda_coef": 0.0, "epsilon": 1e-6}], lr=1e-3
)
scheduler = optim.lr_scheduler.LinearWarmupLRScheduler(total_steps=10, warmup=0.2)
scaler = amp.DynamicLossScaler(loss_scale=1024.0, up_scale_window=3)
info = TrainStepInfo(optimizer_config=config, all_finite=True)
for step in range(6):
    info.optimization_step = step
    info.all_finite = step != 4
    print(step, scheduler.get_lr(info)[0], scaler.update(info))
