// A client of the Kubernetes API that is made of client-go alone, as controllers are: shared informers of Services,
// EndpointSlices and Nodes. A small HTTP server shows what they hold and which requests they sent, and moves the client
// to another server.
package main

import (
	"encoding/json"
	"flag"
	"fmt"
	"log"
	"net/http"
	"strconv"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/tools/clientcmd"
)

func main() {
	kubeconfig := flag.String("kubeconfig", "", "file with the server's address and the credentials")
	contentType := flag.String("content-type", "application/json", "encoding of the objects")
	listen := flag.String("listen", "127.0.0.1:7500", "address of the HTTP server")
	flag.Parse()
	if err := run(*kubeconfig, *contentType, *listen); err != nil {
		log.Fatal(err)
	}
}

func run(kubeconfig, contentType, listen string) error {
	config, err := clientcmd.BuildConfigFromFlags("", kubeconfig)
	if err != nil {
		return err
	}
	config.ContentType = contentType
	config.AcceptContentTypes = contentType
	dialer := &movable{}
	requests := &counter{}
	config.Dial = dialer.dial
	config.Wrap(requests.wrap)
	clients, err := kubernetes.NewForConfig(config)
	if err != nil {
		return err
	}
	following, err := follow(clients)
	if err != nil {
		return err
	}
	http.HandleFunc("/cache", func(w http.ResponseWriter, _ *http.Request) { reply(w, following.objects()) })
	http.HandleFunc("/synced", func(w http.ResponseWriter, _ *http.Request) { reply(w, following.hasSynced()) })
	http.HandleFunc("/events", func(w http.ResponseWriter, _ *http.Request) { reply(w, following.eventCounts()) })
	http.HandleFunc("/requests", func(w http.ResponseWriter, _ *http.Request) { reply(w, requests.counts()) })
	http.HandleFunc("/move", func(w http.ResponseWriter, r *http.Request) {
		dialer.move(r.URL.Query().Get("to"))
		reply(w, true)
	})
	return http.ListenAndServe(listen, nil)
}

func reply(w http.ResponseWriter, value any) {
	body, err := json.Marshal(value)
	if err != nil {
		log.Fatal(err)
	}
	// The tests' client does not know chunks.
	w.Header().Set("Content-Length", strconv.Itoa(len(body)))
	if _, err := w.Write(body); err != nil {
		log.Print(err)
	}
}

// following holds the informers by the name of their resource.
type following struct {
	informers map[string]cache.SharedIndexInformer
	events    *eventCounter
}

func follow(clients kubernetes.Interface) (*following, error) {
	// The selectors are those of kube-proxy.
	services := informers.NewSharedInformerFactoryWithOptions(clients, 0,
		informers.WithTweakListOptions(func(options *metav1.ListOptions) {
			options.LabelSelector = "!service.kubernetes.io/service-proxy-name"
			options.FieldSelector = "spec.clusterIP!=None"
		})).Core().V1().Services().Informer()
	slices := informers.NewSharedInformerFactoryWithOptions(clients, 0,
		informers.WithTweakListOptions(func(options *metav1.ListOptions) {
			options.LabelSelector = "!service.kubernetes.io/headless"
		})).Discovery().V1().EndpointSlices().Informer()
	nodes := informers.NewSharedInformerFactory(clients, 0).Core().V1().Nodes().Informer()
	all := &following{
		informers: map[string]cache.SharedIndexInformer{"services": services, "endpointslices": slices, "nodes": nodes},
		events:    &eventCounter{},
	}
	for name, informer := range all.informers {
		if _, err := informer.AddEventHandler(all.events.handler(name)); err != nil {
			return nil, err
		}
		go informer.Run(nil)
	}
	return all, nil
}

func (f *following) hasSynced() bool {
	for _, informer := range f.informers {
		if !informer.HasSynced() {
			return false
		}
	}
	return true
}

// objects returns the whole objects by resource, and by namespace and name.
func (f *following) objects() map[string]map[string]any {
	all := map[string]map[string]any{}
	for name, informer := range f.informers {
		all[name] = map[string]any{}
		for _, object := range informer.GetStore().List() {
			accessor, err := meta.Accessor(object)
			if err != nil {
				log.Fatal(err)
			}
			all[name][fmt.Sprintf("%s/%s", accessor.GetNamespace(), accessor.GetName())] = object
		}
	}
	return all
}

func (f *following) eventCounts() map[string]int {
	return f.events.counts()
}
