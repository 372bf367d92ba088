package main

import (
	"context"
	"encoding/base64"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
)

// setPower follows the annotation vm.cproxy.dev/power.
func (m *podVM) setPower(ctx context.Context) {
	wanted := m.spec().Annotations[powerAnnotation] == powerSaved
	m.mu.Lock()
	machine, isSaved, isRunning := m.vm, m.isSaved, m.condition.waiting == nil && m.condition.ended == nil
	m.mu.Unlock()
	if wanted == isSaved || !isRunning {
		return
	}
	var err error
	if wanted {
		err = m.save(machine)
	} else {
		err = m.restore(ctx, machine)
	}
	if err != nil {
		m.event(corev1.EventTypeWarning, "FailedSnapshot", err.Error())
	}
}

func (m *podVM) save(machine *vm) error {
	m.setSaved(true)
	m.change(func(c *condition) { c.ready, c.notReady = false, "Saved" })
	if err := machine.save(); err != nil {
		m.setSaved(false)
		return err
	}
	m.event(corev1.EventTypeNormal, "Saved", "the VM's state is in a file, and the VM is off")
	return nil
}

func (m *podVM) restore(ctx context.Context, machine *vm) error {
	if err := machine.start(true); err != nil {
		return err
	}
	if err := machine.resume(); err != nil {
		return err
	}
	m.setSaved(false)
	// The order in which a restored guest needs them.
	if err := machine.tell(fmt.Sprintf("restored %d", time.Now().Unix())); err != nil {
		return err
	}
	m.sendToken(ctx)
	hasProbe := m.container().ReadinessProbe != nil
	m.change(func(c *condition) { c.ready, c.notReady = !hasProbe, "" })
	m.event(corev1.EventTypeNormal, "Restored", "the VM goes on from its saved state")
	return nil
}

func (m *podVM) setSaved(is bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.isSaved = is
}

// sendToken gives cproxy in the guest a new token.
func (m *podVM) sendToken(ctx context.Context) {
	p := m.provider
	token, err := p.token(ctx, cproxyAccount(p.settings.nodeName, p.nodeUID), "", tokenLifetime)
	if err == nil {
		content := base64.StdEncoding.EncodeToString([]byte(token))
		err = m.machine().tell("file /" + serviceAccountDirectory + "/token " + content)
	}
	if err != nil {
		m.event(corev1.EventTypeWarning, "FailedTokenRenewal", err.Error())
	}
}
