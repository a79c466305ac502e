package journal

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"strings"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"

	"github.com/berth-sandbox/berth/api/v1alpha1"
)

const (
	resource   = "journalslots"
	namePrefix = "berth-"
	// listPage is the number of slots in one page. A slot may hold some hundred KB, and a page is
	// in memory several times while it is decoded. All pages of a list show the same snapshot.
	listPage = 8
)

// Objects is a Store of JournalSlot objects.
type Objects struct {
	// Client serves the API group berth.sh.
	Client    rest.Interface
	Namespace string
}

func nameOf(index int) string { return fmt.Sprintf("%s%03d", namePrefix, index) }

// List implements Store. A list without a resource version is consistent: the API server reads its
// store, or a cache that it has verified to be as new.
func (o *Objects) List(ctx context.Context, f func(Slot) error) error {
	for next := ""; ; {
		var page v1alpha1.JournalSlotList
		r := o.Client.Get().Namespace(o.Namespace).Resource(resource).Param("limit", strconv.Itoa(listPage))
		if next != "" {
			r = r.Param("continue", next)
		}
		if err := r.Do(ctx).Into(&page); err != nil {
			return fmt.Errorf("list journal slots: %w", err)
		}
		for i := range page.Items {
			s, err := fromObject(&page.Items[i])
			if err != nil {
				return err
			}
			if err := f(s); err != nil {
				return err
			}
		}
		if next = page.Continue; next == "" {
			return nil
		}
	}
}

// listMetadataOnly requests only the metadata of listed objects.
const listMetadataOnly = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"

// Versions implements Store.
func (o *Objects) Versions(ctx context.Context) (map[int]string, error) {
	raw, err := o.Client.Get().Namespace(o.Namespace).Resource(resource).SetHeader("Accept", listMetadataOnly).Do(ctx).Raw()
	if err != nil {
		return nil, fmt.Errorf("list journal slots: %w", err)
	}
	var list metav1.PartialObjectMetadataList
	if err := json.Unmarshal(raw, &list); err != nil {
		return nil, fmt.Errorf("list journal slots: %w", err)
	}
	versions := make(map[int]string, len(list.Items))
	for i := range list.Items {
		index, err := indexOf(list.Items[i].Name)
		if err != nil {
			return nil, err
		}
		versions[index] = list.Items[i].ResourceVersion
	}
	return versions, nil
}

// Read implements Store.
func (o *Objects) Read(ctx context.Context, index int) (Slot, error) {
	var found v1alpha1.JournalSlot
	err := o.Client.Get().Namespace(o.Namespace).Resource(resource).Name(nameOf(index)).Do(ctx).Into(&found)
	switch {
	case apierrors.IsNotFound(err):
		return Slot{}, fmt.Errorf("%w: %s", ErrMissing, nameOf(index))
	case err != nil:
		return Slot{}, fmt.Errorf("read journal slot %s: %w", nameOf(index), err)
	}
	return fromObject(&found)
}

// metadataOnly requests only the metadata of the written object.
const metadataOnly = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1,application/json"

// Write implements Store.
func (o *Objects) Write(ctx context.Context, s Slot) (string, error) {
	return versionOf("write", s, o.Client.Put().Namespace(o.Namespace).Resource(resource).Name(nameOf(s.Index)).
		SetHeader("Accept", metadataOnly).Body(toObject(s, o.Namespace)).Do(ctx))
}

// Create implements Store.
func (o *Objects) Create(ctx context.Context, s Slot) (string, error) {
	s.Version = ""
	version, err := versionOf("create", s, o.Client.Post().Namespace(o.Namespace).Resource(resource).
		SetHeader("Accept", metadataOnly).Body(toObject(s, o.Namespace)).Do(ctx))
	if apierrors.IsAlreadyExists(err) {
		return "", fmt.Errorf("%w: %s", ErrExists, nameOf(s.Index))
	}
	return version, err
}

// versionOf returns the resource version in the answer to a write.
func versionOf(what string, s Slot, result rest.Result) (string, error) {
	raw, err := result.Raw()
	if err != nil {
		return "", fmt.Errorf("%s journal slot %s: %w", what, nameOf(s.Index), err)
	}
	var written metav1.PartialObjectMetadata
	if err := json.Unmarshal(raw, &written); err != nil {
		return "", fmt.Errorf("%s journal slot %s: answer: %w", what, nameOf(s.Index), err)
	}
	if written.ResourceVersion == "" {
		return "", fmt.Errorf("%s journal slot %s: the answer has no resource version", what, nameOf(s.Index))
	}
	return written.ResourceVersion, nil
}

func toObject(s Slot, namespace string) *v1alpha1.JournalSlot {
	return &v1alpha1.JournalSlot{
		TypeMeta:   metav1.TypeMeta{APIVersion: v1alpha1.GroupVersion().String(), Kind: "JournalSlot"},
		ObjectMeta: metav1.ObjectMeta{Name: nameOf(s.Index), Namespace: namespace, ResourceVersion: s.Version},
		Spec: v1alpha1.JournalSlotSpec{
			Slots: int32(s.Slots), Format: int32(s.Format), Position: int64(s.Position), Term: int64(s.Term),
			Nonce: s.Nonce, Records: int32(s.Records), Data: s.Data,
		},
	}
}

func indexOf(name string) (int, error) {
	index, err := strconv.Atoi(strings.TrimPrefix(name, namePrefix))
	if err != nil || nameOf(index) != name {
		return 0, fmt.Errorf("%w: JournalSlot %q does not belong to the journal, whose slots have names like %s; delete it", ErrDamaged, name, nameOf(0))
	}
	return index, nil
}

func fromObject(o *v1alpha1.JournalSlot) (Slot, error) {
	index, err := indexOf(o.Name)
	if err != nil {
		return Slot{}, err
	}
	if o.Spec.Position < 0 || o.Spec.Term < 0 || o.Spec.Slots < 2 {
		return Slot{}, errors.Join(ErrDamaged, fmt.Errorf("JournalSlot %s: position %d, term %d, slots %d", o.Name, o.Spec.Position, o.Spec.Term, o.Spec.Slots))
	}
	return Slot{
		Index: index, Version: o.ResourceVersion, Slots: int(o.Spec.Slots), Format: int(o.Spec.Format),
		Position: uint64(o.Spec.Position), Term: uint64(o.Spec.Term), Nonce: o.Spec.Nonce,
		Records: int(o.Spec.Records), Data: o.Spec.Data,
	}, nil
}
