// One binary with all commands of a Kubernetes API, for deploy.py: etcd, the
// API server, the controller manager and the scheduler, each as its own command. `go install` cannot
// install Kubernetes, but its commands can be called.
package main

import (
	"fmt"
	"os"

	"github.com/spf13/cobra"
	"go.etcd.io/etcd/server/v3/etcdmain"
	"k8s.io/component-base/cli"
	apiserver "k8s.io/kubernetes/cmd/kube-apiserver/app"
	controllers "k8s.io/kubernetes/cmd/kube-controller-manager/app"
	scheduler "k8s.io/kubernetes/cmd/kube-scheduler/app"
)

func main() {
	if len(os.Args) < 2 {
		fmt.Fprintln(os.Stderr, "usage: cluster etcd|apiserver|controllers|scheduler [FLAG...]")
		os.Exit(2)
	}
	name := os.Args[1]
	os.Args = append(os.Args[:1], os.Args[2:]...)
	var command *cobra.Command
	switch name {
	case "etcd":
		etcdmain.Main(os.Args)
		return
	case "apiserver":
		command = apiserver.NewAPIServerCommand()
	case "controllers":
		command = controllers.NewControllerManagerCommand()
	case "scheduler":
		command = scheduler.NewSchedulerCommand()
	default:
		fmt.Fprintln(os.Stderr, "no such command:", name)
		os.Exit(2)
	}
	os.Exit(cli.Run(command))
}
