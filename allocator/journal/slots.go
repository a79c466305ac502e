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
	// listPage bounds one answer: slots may hold some hundred KB each. The pages
	// of one list all show the same moment.
	listPage = 64
)

// Objects is a Store of JournalSlot objects.
type Objects struct {
	// Client serves group berth.sh.
	Client    rest.Interface
	Namespace string
}

func nameOf(index int) string { return fmt.Sprintf("%s%03d", namePrefix, index) }

// List implements Store. Without a resource version the API server answers a
// list from its store, or from a cache that it has made sure is as new.
func (o *Objects) List(ctx context.Context) ([]Slot, error) {
	var all []Slot
	for next := ""; ; {
		var page v1alpha1.JournalSlotList
		r := o.Client.Get().Namespace(o.Namespace).Resource(resource).Param("limit", strconv.Itoa(listPage))
		if next != "" {
			r = r.Param("continue", next)
		}
		if err := r.Do(ctx).Into(&page); err != nil {
			return nil, fmt.Errorf("list journal slots: %w", err)
		}
		for i := range page.Items {
			s, err := fromObject(&page.Items[i])
			if err != nil {
				return nil, err
			}
			all = append(all, s)
		}
		if next = page.Continue; next == "" {
			return all, nil
		}
	}
}

// Read implements Store.
func (o *Objects) Read(ctx context.Context, index int) (Slot, error) {
	var found v1alpha1.JournalSlot
	err := o.Client.Get().Namespace(o.Namespace).Resource(resource).Name(nameOf(index)).Do(ctx).Into(&found)
	switch {
	case apierrors.IsNotFound(err):
		return Slot{}, fmt.Errorf("%w: %s; restore the slots from a backup of etcd", ErrMissing, nameOf(index))
	case err != nil:
		return Slot{}, fmt.Errorf("read journal slot %s: %w", nameOf(index), err)
	}
	return fromObject(&found)
}

// metadataOnly asks for the metadata of what was written, and not for all of it.
const metadataOnly = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1,application/json"

// Write implements Store.
func (o *Objects) Write(ctx context.Context, s Slot) (string, error) {
	raw, err := o.Client.Put().Namespace(o.Namespace).Resource(resource).Name(nameOf(s.Index)).
		SetHeader("Accept", metadataOnly).Body(toObject(s, o.Namespace)).Do(ctx).Raw()
	if err != nil {
		return "", fmt.Errorf("write journal slot %s: %w", nameOf(s.Index), err)
	}
	var written metav1.PartialObjectMetadata
	if err := json.Unmarshal(raw, &written); err != nil {
		return "", fmt.Errorf("write journal slot %s: answer: %w", nameOf(s.Index), err)
	}
	if written.ResourceVersion == "" {
		return "", fmt.Errorf("write journal slot %s: the answer has no resource version", nameOf(s.Index))
	}
	return written.ResourceVersion, nil
}

// Create implements Store.
func (o *Objects) Create(ctx context.Context, s Slot) error {
	err := o.Client.Post().Namespace(o.Namespace).Resource(resource).Body(toObject(s, o.Namespace)).Do(ctx).Error()
	if err != nil && !apierrors.IsAlreadyExists(err) {
		return fmt.Errorf("create journal slot %s: %w", nameOf(s.Index), err)
	}
	return nil
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

func fromObject(o *v1alpha1.JournalSlot) (Slot, error) {
	index, err := strconv.Atoi(strings.TrimPrefix(o.Name, namePrefix))
	if err != nil || nameOf(index) != o.Name {
		return Slot{}, fmt.Errorf("%w: JournalSlot %q is not one of the allocator's, which are called %s; delete it", ErrDamaged, o.Name, nameOf(0))
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
