package main

import (
	"context"
	"errors"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/client-go/kubernetes"
	listers "k8s.io/client-go/listers/core/v1"
	"k8s.io/client-go/tools/cache"
)

// errNotListed is what a list of Secrets or ConfigMaps gives: the provider may only get those of its pods' namespaces.
var errNotListed = errors.New("the provider gets single objects alone")

// secrets gets single Secrets, where an informer would follow those of the whole cluster.
type secrets struct{ client kubernetes.Interface }

type secretsOf struct {
	client    kubernetes.Interface
	namespace string
}

func (s secrets) Informer() cache.SharedIndexInformer             { return nil }
func (s secrets) Lister() listers.SecretLister                    { return s }
func (s secrets) List(labels.Selector) ([]*corev1.Secret, error)  { return nil, errNotListed }
func (s secrets) Secrets(of string) listers.SecretNamespaceLister { return secretsOf{s.client, of} }

func (s secretsOf) List(labels.Selector) ([]*corev1.Secret, error) { return nil, errNotListed }
func (s secretsOf) Get(name string) (*corev1.Secret, error) {
	return s.client.CoreV1().Secrets(s.namespace).Get(context.Background(), name, metav1.GetOptions{})
}

// configMaps does the same for ConfigMaps.
type configMaps struct{ client kubernetes.Interface }

type configMapsOf struct {
	client    kubernetes.Interface
	namespace string
}

func (c configMaps) Informer() cache.SharedIndexInformer               { return nil }
func (c configMaps) Lister() listers.ConfigMapLister                   { return c }
func (c configMaps) List(labels.Selector) ([]*corev1.ConfigMap, error) { return nil, errNotListed }
func (c configMaps) ConfigMaps(of string) listers.ConfigMapNamespaceLister {
	return configMapsOf{c.client, of}
}

func (c configMapsOf) List(labels.Selector) ([]*corev1.ConfigMap, error) { return nil, errNotListed }
func (c configMapsOf) Get(name string) (*corev1.ConfigMap, error) {
	return c.client.CoreV1().ConfigMaps(c.namespace).Get(context.Background(), name, metav1.GetOptions{})
}
