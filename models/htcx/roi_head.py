"""HTC-X's RoI head, HTC-Lite: a box cascade with a global context, and a mask head after the last stage."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from mmdet.models.roi_heads import CascadeRoIHead
from mmdet.models.utils import empty_instances, unpack_gt_instances
from mmdet.registry import MODELS
from mmdet.structures.bbox import bbox2roi
from mmengine.structures import InstanceData
from torch import Tensor


class _Maps(tuple):
    """The maps of the pyramid and their context vectors (N, C, 1, 1)."""

    context: Tensor | None = None


@MODELS.register_module()
class HTCXRoIHead(CascadeRoIHead):
    """No semantic branch and no mask flow between stages. Predicts boxes only if `mask_head` is None.

    context_head: mmdet's GlobalContextHead (or None): convolutions, global pooling and a multi-label loss. Its vector
        is added to the features of every region of its image, for boxes and masks. It reads level `context_level`
        (3 is P6 of P3-P8; a mean over the few pixels of P8 would carry little information).
    bbox_head: one for all stages (built once for each) or a list. `target_stds` sets the box coder of each stage.
    mask_loss_weight: factor of the mask loss. The box losses have the weights of their stages.
    """

    def __init__(
        self,
        num_stages: int,
        stage_loss_weights: Sequence[float],
        bbox_head: Any,
        context_head: Any = None,
        context_level: int = 3,
        target_stds: Sequence[Sequence[float]] | None = None,
        mask_loss_weight: float = 1.0,
        **options: Any,
    ) -> None:
        if target_stds is not None:
            if isinstance(bbox_head, (list, tuple)) or len(target_stds) != num_stages:
                raise ValueError("target_stds needs one bbox_head for all stages, and one entry for each of them")
            bbox_head = [copy.deepcopy(bbox_head) for _ in range(num_stages)]
            for head, stds in zip(bbox_head, target_stds):
                head["bbox_coder"]["target_stds"] = list(stds)
        super().__init__(num_stages=num_stages, stage_loss_weights=stage_loss_weights, bbox_head=bbox_head, **options)
        self.context_head = None if context_head is None else MODELS.build(context_head)
        self.context_level, self.mask_loss_weight = context_level, mask_loss_weight

    def init_mask_head(self, mask_roi_extractor: Any, mask_head: Any) -> None:
        self.mask_roi_extractor = MODELS.build(mask_roi_extractor)
        self.mask_head = MODELS.build(mask_head)

    def _with_context(self, x: Sequence[Tensor]) -> tuple[_Maps, Tensor | None]:
        """The maps with their context, and its class scores (N, classes)."""
        maps, scores = _Maps(x), None
        if self.context_head is not None:
            scores, maps.context = self.context_head([x[self.context_level]])
        return maps, scores

    def _region_features(self, extractor: Any, x: Sequence[Tensor], rois: Tensor) -> Tensor:
        features = extractor(x[: extractor.num_inputs], rois)
        context = getattr(x, "context", None)
        # rois[:, 0] is the index of the image. All pixels of a region get the same vector.
        return features if context is None else features + context[rois[:, 0].long()].to(features.dtype)

    def _bbox_forward(self, stage: int, x: Sequence[Tensor], rois: Tensor) -> dict[str, Tensor]:
        features = self._region_features(self.bbox_roi_extractor[stage], x, rois)
        cls_score, bbox_pred = self.bbox_head[stage](features)
        return dict(cls_score=cls_score, bbox_pred=bbox_pred, bbox_feats=features)

    def _mask_forward(self, x: Sequence[Tensor], rois: Tensor) -> dict[str, Tensor]:
        return dict(mask_preds=self.mask_head(self._region_features(self.mask_roi_extractor, x, rois)))

    def loss(self, x: Sequence[Tensor], rpn_results_list: list, batch_data_samples: list) -> dict[str, Tensor]:
        truth, ignored, metas = unpack_gt_instances(batch_data_samples)
        losses: dict[str, Tensor] = {}
        x, scores = self._with_context(x)
        if self.context_head is not None:
            losses["loss_context"] = self.context_head.loss(scores, [t.labels for t in truth])
        proposals = rpn_results_list
        for stage, weight in enumerate(self.stage_loss_weights):
            self.current_stage = stage
            sampled = [self._sample(stage, *parts) for parts in zip(proposals, truth, ignored)]
            boxes = self.bbox_loss(stage, x, sampled)
            # Without any region, mmdet omits the class loss and returns no proposals. Ranks wait for each other, so
            # here every rank still runs every head and has every loss.
            parts = {"loss_cls": boxes["cls_score"].sum() * 0, **boxes["loss_bbox"]}
            losses.update(
                {f"s{stage}.{name}": value * weight if "loss" in name else value for name, value in parts.items()}
            )
            if stage + 1 < self.num_stages:
                with torch.no_grad():
                    proposals = self.bbox_head[stage].refine_bboxes(sampled, boxes, metas)
                if proposals is None:
                    proposals = [InstanceData(bboxes=s.priors[:0]) for s in sampled]
        if self.with_mask:
            results = self._mask_forward(x, bbox2roi([s.pos_priors for s in sampled]))
            found = self.mask_head.loss_and_target(
                mask_preds=results["mask_preds"],
                sampling_results=sampled,
                batch_gt_instances=truth,
                rcnn_train_cfg=self.train_cfg[-1],
            )
            losses["loss_mask"] = found["loss_mask"]["loss_mask"] * self.mask_loss_weight
        return losses

    def _sample(self, stage: int, proposals: Any, truth: Any, ignored: Any) -> Any:
        proposals.priors = proposals.pop("bboxes")
        assigned = self.bbox_assigner[stage].assign(proposals, truth, ignored)
        return self.bbox_sampler[stage].sample(assigned, proposals, truth)

    def predict(
        self, x: Sequence[Tensor], rpn_results_list: list, batch_data_samples: list, rescale: bool = False
    ) -> list:
        return super().predict(self._with_context(x)[0], rpn_results_list, batch_data_samples, rescale)

    def predict_mask(
        self, x: Sequence[Tensor], batch_img_metas: list, results_list: list, rescale: bool = False
    ) -> list:
        rois = bbox2roi([result.bboxes for result in results_list])
        if len(rois) == 0:
            return empty_instances(
                batch_img_metas,
                rois.device,
                task_type="mask",
                instance_results=results_list,
                mask_thr_binary=self.test_cfg.mask_thr_binary,
            )
        masks = self._mask_forward(x, rois)["mask_preds"].split([len(result) for result in results_list])
        return self.mask_head.predict_by_feat(
            mask_preds=masks,
            results_list=results_list,
            batch_img_metas=batch_img_metas,
            rcnn_test_cfg=self.test_cfg,
            rescale=rescale,
        )

    def forward(self, x: Sequence[Tensor], rpn_results_list: list, batch_data_samples: list) -> tuple:
        """Raw outputs for tools that count operations or trace: scores, box deltas and mask logits."""
        x = self._with_context(x)[0]
        counts = [len(result.bboxes) for result in rpn_results_list]
        rois, scores, deltas = self._refine_roi(
            x,
            bbox2roi([result.bboxes for result in rpn_results_list]),
            [sample.metainfo for sample in batch_data_samples],
            counts,
        )
        masks = (self._mask_forward(x, torch.cat(rois))["mask_preds"],) if self.with_mask else ()
        return scores, deltas, *masks
