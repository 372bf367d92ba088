package main

import (
	"context"
	"log"
	"time"

	"github.com/florianl/go-nfqueue/v2"
	"sigs.k8s.io/kube-network-policies/pkg/network"
)

// judgeQueue gives the first engine's verdicts about the packets of a queue of the kernel until the context ends. The
// queue is set up as kube-network-policies sets up its own.
func judgeQueue(ctx context.Context, cluster *Cluster, number uint16) error {
	setDefaults(cluster)
	engine, err := newKubeNetworkPolicies(cluster, podsByAddress(cluster))
	if err != nil {
		return err
	}
	queue, err := nfqueue.Open(&nfqueue.Config{
		NfQueue: number, Flags: nfqueue.NfQaCfgFlagGSO, Copymode: nfqueue.NfQnlCopyPacket,
		MaxPacketLen: 128, MaxQueueLen: 1024, WriteTimeout: 100 * time.Millisecond,
	})
	if err != nil {
		return err
	}
	defer queue.Close()
	judge := func(attribute nfqueue.Attribute) int {
		verdict := nfqueue.NfDrop
		if packet, err := network.ParsePacket(*attribute.Payload); err != nil {
			log.Print(err)
		} else if allowed, err := engine.engine.EvaluatePacket(ctx, &packet); err != nil {
			log.Print(err)
		} else if allowed {
			verdict = nfqueue.NfAccept
		}
		if err := queue.SetVerdict(*attribute.PacketID, verdict); err != nil {
			log.Print(err)
		}
		return 0
	}
	isOver := func(err error) int {
		if ctx.Err() != nil {
			return 1
		}
		log.Print(err)
		return 0
	}
	if err := queue.RegisterWithErrorFunc(ctx, judge, isOver); err != nil {
		return err
	}
	<-ctx.Done()
	return nil
}
