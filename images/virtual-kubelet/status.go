package main

import (
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// condition is what a pod's VM has come to.
type condition struct {
	address  string
	waiting  *corev1.ContainerStateWaiting
	started  metav1.Time
	ready    bool
	notReady string // the reason
	ended    *corev1.ContainerStateTerminated
	restored int32
}

// status is the same as Kubernetes has it.
func (c *condition) status(pod *corev1.Pod) corev1.PodStatus {
	status := corev1.PodStatus{
		StartTime: pod.Status.StartTime, QOSClass: pod.Status.QOSClass, PodIP: c.address, Phase: corev1.PodPending,
	}
	if c.address != "" {
		status.PodIPs = []corev1.PodIP{{IP: c.address}}
	}
	container := corev1.ContainerStatus{Name: pod.Spec.Containers[0].Name, Image: pod.Spec.Containers[0].Image}
	isStarted := c.ended == nil && c.waiting == nil
	container.Started = &isStarted
	switch {
	case c.ended != nil:
		status.Phase = corev1.PodSucceeded
		if c.ended.ExitCode != 0 {
			status.Phase, status.Reason, status.Message = corev1.PodFailed, c.ended.Reason, c.ended.Message
		}
		container.State.Terminated = c.ended
	case c.waiting != nil:
		container.State.Waiting = c.waiting
	default:
		status.Phase = corev1.PodRunning
		container.State.Running = &corev1.ContainerStateRunning{StartedAt: c.started}
		container.Ready = c.ready
	}
	status.ContainerStatuses = []corev1.ContainerStatus{container}
	status.Conditions = c.conditions(pod, container.Ready)
	return status
}

func (c *condition) conditions(pod *corev1.Pod, isReady bool) []corev1.PodCondition {
	reason := c.notReady
	if !isReady && reason == "" {
		reason = "ContainersNotReady"
	}
	wanted := []corev1.PodCondition{
		{Type: corev1.PodScheduled, Status: corev1.ConditionTrue},
		{Type: corev1.PodInitialized, Status: corev1.ConditionTrue},
		{Type: corev1.ContainersReady, Status: truth(isReady), Reason: reason},
		{Type: corev1.PodReady, Status: truth(isReady), Reason: reason},
	}
	for i := range wanted {
		wanted[i].LastTransitionTime = metav1.Now()
		for _, earlier := range pod.Status.Conditions {
			if earlier.Type == wanted[i].Type && earlier.Status == wanted[i].Status {
				wanted[i].LastTransitionTime = earlier.LastTransitionTime
			}
		}
	}
	return wanted
}

func truth(is bool) corev1.ConditionStatus {
	if is {
		return corev1.ConditionTrue
	}
	return corev1.ConditionFalse
}
