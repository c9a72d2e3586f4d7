import torch
from torch import nn

import mprun


def model():
    return nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 4))


def step(model, batch):
    """The mean distance of pairs of points: to be small."""
    first, second = model(batch).chunk(2)
    return (first - second).square().sum(1).sqrt().mean()


if __name__ == "__main__":
    torch.manual_seed(0)
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with mprun.observe(net, optimizer, out="runs/pairs", on_nonfinite="save") as run:
        for number in range(40):
            batch = torch.randn(32, 8)
            if number == 30:
                batch[16] = batch[0]  # a pair of equal points
            optimizer.zero_grad()
            loss = step(net, batch)
            loss.backward()
            optimizer.step()
            run.log(loss=loss)
