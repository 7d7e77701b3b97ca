"""SED's loss and teachers' weights, computed by hand."""

import numpy as np
import torch
from scipy.stats import pearsonr, zscore


def naive_loss(student, teachers, queues, weights, hot, cold, own_key=False):
    """``sum_c w_c mean_x -P_c log Q_c``, with all distributions in memory."""
    total = 0.0
    for z, keys, weight in zip(teachers, queues, weights, strict=True):
        per_image = keys.expand(len(z), *keys.shape)
        if own_key:
            per_image = torch.cat([z[:, None], per_image], dim=1)
        p = torch.einsum("bd,bqd->bq", z, per_image).div(hot).softmax(1)
        q = torch.einsum("bd,bqd->bq", student, per_image).div(cold).softmax(1)
        total = total - weight * (p * q.log()).sum(1).mean()
    return total


def weights_by_hand(scores: np.ndarray) -> np.ndarray:
    mean = zscore(scores, axis=1).mean(0)
    agreement = np.array([max(pearsonr(own, mean).statistic, 0) for own in scores])
    return agreement / agreement.sum()
