
import torch
def squash(x):
    return x*3
class M(torch.nn.Module):
    def __init__(self):
        super().__init__(); self.l=torch.nn.Linear(4,2)
    def forward(self,x):
        return self.l(squash(x))
def make():
    torch.manual_seed(0); return M()
