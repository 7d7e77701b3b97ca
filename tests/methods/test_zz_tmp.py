import pytest, torch
from lit_fedad.methods.fedavg import *
from lit_fedad.methods.moon import MoonClient
from lit_fedad.methods.scaffold import *
from lit_fedad.methods.stateless import trainable
LOG={}
class Sc(ScaffoldClient):
    def on_before_optimizer_step(self, o):
        g={n:p.grad.clone() for n,p in trainable(self.task).items()}
        w={n:p.detach().clone() for n,p in trainable(self.task).items()}
        super().on_before_optimizer_step(o)
        h={n:p.grad.clone() for n,p in trainable(self.task).items()}
        LOG.setdefault((self.context.round,self.context.client),[]).append((w,g,h,{n:v.clone() for n,v in self.own.items()},{n:v.clone() for n,v in self.common.items()},{n:(p.grad.data_ptr()%64,p.data_ptr()%64) for n,p in trainable(self.task).items()}))
def test_x(federate, make_classifier, make_points):
    sizes = {0: 4, 1: 6, 2: 8}
    data = {client: make_points(size, seed=client) for client, size in sizes.items()}
    moved = {0: data[2], 1: data[0], 2: data[1]}
    a=federate(Sc,ScaffoldServer,client={"learning_rate":0.05},task=make_classifier(),data=data)
    A=dict(LOG); LOG.clear()
    b=federate(Sc,ScaffoldServer,client={"learning_rate":0.05},task=make_classifier(),data=moved)
    for r in (1,2,3):
        for c,h in {0:1,1:2,2:0}.items():
            for i,(x,y) in enumerate(zip(A[r,c],LOG[r,h])):
                for k,what in enumerate(("w","g","h","own","common")):
                    for n in x[k]:
                        if not torch.equal(x[k][n],y[k][n]): print(r,c,i,what,n,(x[k][n]-y[k][n]).abs().max().item(), x[5][n],y[5][n])
