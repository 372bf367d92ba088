// The cases that cyclonus generates for network plugins, against pods whose network namespaces are on this machine.
// For each of them it makes the policies and changes the objects, lets each pod call each other one at each port, and
// compares with the verdicts of cyclonus' own matcher. It prints one line for each case.
package main

import (
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"log"
	"os"

	"github.com/mattfenwick/cyclonus/pkg/connectivity"
	"github.com/mattfenwick/cyclonus/pkg/connectivity/probe"
	"github.com/mattfenwick/cyclonus/pkg/generator"
	"github.com/sirupsen/logrus"
	corev1 "k8s.io/api/core/v1"
)

const (
	// podSeconds is the limit on the start of all pods.
	podSeconds = 120
	// probes are the most for one step, one after the other, as a change takes effect soon after the API server's
	// answer and not before it.
	probes = 30
)

// The cluster of cyclonus. Its Services with SCTP are left out: cproxy translates TCP and UDP.
var (
	namespaces = []string{"x", "y", "z"}
	pods       = []string{"a", "b", "c"}
	ports      = []int{80, 81}
	protocols  = []corev1.Protocol{corev1.ProtocolTCP, corev1.ProtocolUDP}
)

// outcome is a line of the output.
type outcome struct {
	Case        string   `json:"case"`
	Steps       int      `json:"steps"`
	Calls       int      `json:"calls"`
	Differences []string `json:"differences,omitempty"`
	Error       string   `json:"error,omitempty"`
}

func main() {
	kubeconfig := flag.String("kubeconfig", "", "API server and identity of an administrator")
	cgroup := flag.String("cgroup", "", "cgroup2 directory with the cgroups of the pods")
	isCaller := flag.Bool("call", false, "make the calls of the standard input, where the process is")
	flag.Parse()
	if *isCaller {
		if err := makeCalls(os.Stdin, os.Stdout); err != nil {
			log.Fatal(err)
		}
		return
	}
	// cyclonus writes what it does; the lines of the output are ours.
	lines := json.NewEncoder(os.Stdout)
	os.Stdout = os.Stderr
	logrus.SetOutput(io.Discard)
	if err := run(*kubeconfig, *cgroup, lines); err != nil {
		log.Fatal(err)
	}
}

func run(kubeconfig, cgroup string, lines *json.Encoder) error {
	cluster, err := newCluster(kubeconfig, cgroup)
	if err != nil {
		return err
	}
	resources, err := probe.NewDefaultResources(
		cluster, namespaces, pods, ports, protocols, nil, podSeconds, false, "registry.k8s.io")
	if err != nil {
		return err
	}
	last, err := resources.GetPod("z", "c")
	if err != nil {
		return err
	}
	// A pod reaches itself under each policy, as cproxy and most plugins have it; cyclonus' matcher has no exception.
	interpreter := connectivity.NewInterpreter(cluster, resources, &connectivity.InterpreterConfig{
		ResetClusterBeforeTestCase: true, VerifyClusterStateBeforeTestCase: true,
		KubeProbeRetries: probes - 1, BatchJobs: true, IgnoreLoopback: true,
	})
	cases := generator.NewTestCaseGenerator(true, last.IP, namespaces, nil, nil)
	for _, testCase := range cases.GenerateAllTestCases() {
		if err := lines.Encode(outcomeOf(interpreter.ExecuteTestCase(testCase))); err != nil {
			return err
		}
	}
	return nil
}

func outcomeOf(result *connectivity.Result) outcome {
	outcome := outcome{Case: result.TestCase.Description, Steps: len(result.Steps)}
	if result.Err != nil {
		outcome.Error = result.Err.Error()
	}
	for number, step := range result.Steps {
		comparison := step.LastComparison()
		for _, key := range comparison.Wrapped.Keys() {
			if key.From == key.To {
				continue
			}
			item := comparison.Get(key.From, key.To)
			for port, found := range item.Kube.JobResults {
				outcome.Calls++
				if expected := item.Simulated.JobResults[port].Combined; found.Combined != expected {
					outcome.Differences = append(outcome.Differences, fmt.Sprintf("step %d: %s to %s, %s: %s, expected: %s",
						number+1, key.From, key.To, port, found.Combined, expected))
				}
			}
		}
	}
	return outcome
}
