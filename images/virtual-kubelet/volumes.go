package main

import (
	"context"
	"fmt"
	"path"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

// account is a ServiceAccount, and the object whose end ends its token.
type account struct {
	namespace, name string
	bound           authenticationv1.BoundObjectReference
}

// cproxyAccount is that of cproxy in every VM (images/kubernetes/overlays/baked-in).
func cproxyAccount(node string, uid types.UID) account {
	bound := authenticationv1.BoundObjectReference{Kind: "Node", APIVersion: "v1", Name: node, UID: uid}
	return account{"kube-system", "cproxy", bound}
}

// podAccount is that of the pod's own processes.
func podAccount(pod *corev1.Pod) account {
	bound := authenticationv1.BoundObjectReference{Kind: "Pod", APIVersion: "v1", Name: pod.Name, UID: pod.UID}
	return account{pod.Namespace, pod.Spec.ServiceAccountName, bound}
}

func (p *provider) token(ctx context.Context, of account, audience string, lifetime time.Duration) (string, error) {
	seconds := int64(lifetime.Seconds())
	request := &authenticationv1.TokenRequest{
		Spec: authenticationv1.TokenRequestSpec{ExpirationSeconds: &seconds, BoundObjectRef: &of.bound},
	}
	if audience != "" {
		request.Spec.Audiences = []string{audience}
	}
	accounts := p.client.CoreV1().ServiceAccounts(of.namespace)
	answer, err := accounts.CreateToken(ctx, of.name, request, metav1.CreateOptions{})
	if err != nil {
		return "", fmt.Errorf("token of the ServiceAccount %s/%s: %w", of.namespace, of.name, err)
	}
	return answer.Status.Token, nil
}

// credentials are the files that clients of the API server look for.
func (p *provider) credentials(ctx context.Context, of account) (tree, error) {
	token, err := p.token(ctx, of, "", tokenLifetime)
	if err != nil {
		return nil, err
	}
	files := tree{}
	files.add("token", token)
	files.add("ca.crt", p.authority)
	files.add("namespace", of.namespace)
	return files, nil
}

// volumeFiles are the files of all volumes that the container mounts, at their places. They are copies: later changes
// of a ConfigMap or Secret do not arrive.
func (p *provider) volumeFiles(ctx context.Context, pod *corev1.Pod, container *corev1.Container) (tree, error) {
	volumes := map[string]corev1.VolumeSource{}
	for _, volume := range pod.Spec.Volumes {
		volumes[volume.Name] = volume.VolumeSource
	}
	files := tree{}
	for _, mount := range container.VolumeMounts {
		content := tree{}
		if err := p.volume(ctx, pod, volumes[mount.Name], content); err != nil {
			return nil, fmt.Errorf("volume %s: %w", mount.Name, err)
		}
		files.directory(mount.MountPath)
		if file, is := content[mount.SubPath]; is && mount.SubPath != "" {
			files[inside(mount.MountPath)] = file
			continue
		}
		files.below(mount.MountPath, content)
	}
	return files, nil
}

func (p *provider) volume(ctx context.Context, pod *corev1.Pod, source corev1.VolumeSource, files tree) error {
	get := metav1.GetOptions{}
	switch {
	case source.EmptyDir != nil:
		return nil
	case source.ConfigMap != nil:
		object, err := p.client.CoreV1().ConfigMaps(pod.Namespace).Get(ctx, source.ConfigMap.Name, get)
		if err != nil {
			return err
		}
		return addItems(files, object.Data, source.ConfigMap.Items)
	case source.Secret != nil:
		object, err := p.client.CoreV1().Secrets(pod.Namespace).Get(ctx, source.Secret.SecretName, get)
		if err != nil {
			return err
		}
		data := map[string]string{}
		for key, value := range object.Data {
			data[key] = string(value)
		}
		return addItems(files, data, source.Secret.Items)
	case source.Projected != nil:
		for _, part := range source.Projected.Sources {
			if err := p.projection(ctx, pod, part, files); err != nil {
				return err
			}
		}
		return nil
	}
	return fmt.Errorf("this provider has emptyDir, configMap, secret and projected volumes alone")
}

func (p *provider) projection(ctx context.Context, pod *corev1.Pod, part corev1.VolumeProjection, files tree) error {
	switch {
	case part.ServiceAccountToken != nil:
		token, err := p.token(ctx, podAccount(pod), part.ServiceAccountToken.Audience, tokenLifetime)
		files.add(part.ServiceAccountToken.Path, token)
		return err
	case part.ConfigMap != nil:
		reference := corev1.ConfigMapVolumeSource{LocalObjectReference: part.ConfigMap.LocalObjectReference, Items: part.ConfigMap.Items}
		return p.volume(ctx, pod, corev1.VolumeSource{ConfigMap: &reference}, files)
	case part.Secret != nil:
		reference := corev1.SecretVolumeSource{SecretName: part.Secret.Name, Items: part.Secret.Items}
		return p.volume(ctx, pod, corev1.VolumeSource{Secret: &reference}, files)
	case part.DownwardAPI != nil:
		return addDownwardAPI(files, pod, part.DownwardAPI.Items)
	}
	return fmt.Errorf("this provider projects tokens, ConfigMaps, Secrets and the pod's name and namespace alone")
}

func addDownwardAPI(files tree, pod *corev1.Pod, items []corev1.DownwardAPIVolumeFile) error {
	values := map[string]string{"metadata.name": pod.Name, "metadata.namespace": pod.Namespace, "metadata.uid": string(pod.UID)}
	for _, item := range items {
		if item.FieldRef == nil || values[item.FieldRef.FieldPath] == "" {
			return fmt.Errorf("this provider projects no other field of a pod than its name, namespace and uid")
		}
		files.add(item.Path, values[item.FieldRef.FieldPath])
	}
	return nil
}

// addItems adds the chosen keys, or all.
func addItems(files tree, data map[string]string, items []corev1.KeyToPath) error {
	if len(items) == 0 {
		for key, value := range data {
			files.add(key, value)
		}
	}
	for _, item := range items {
		value, is := data[item.Key]
		if !is {
			return fmt.Errorf("no key %q", item.Key)
		}
		files.add(path.Clean(item.Path), value)
	}
	return nil
}
