package devcluster

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"

	"github.com/berth-sandbox/berth/devcluster/proc"
	"github.com/berth-sandbox/berth/tools"
)

// kwokVersion is the version that is built. tools/kwok.mod requires the same.
const kwokVersion = "v0.8.0"

// kwokStages are files of the module's folder kustomize/stage. They make nodes ready
// and keep them ready, and make pods ready, complete and gone. A whole folder cannot
// be passed to KWOK, because its kustomization.yaml is not a stage.
var kwokStages = [...]string{
	"node/fast/node-initialize.yaml",
	"node/heartbeat/node-heartbeat.yaml",
	"pod/fast/pod-ready.yaml",
	"pod/fast/pod-complete.yaml",
	"pod/fast/pod-delete.yaml",
}

// KWOKBinary returns the paths of KWOK and of the stage files that define what nodes
// and pods do. Each stage file is passed with --config. All come from the cache. If
// they are missing there, they are built and copied from the pinned Go module, which
// takes one to two minutes. A KWOK on PATH is not used, because stages belong to a
// version.
func KWOKBinary(ctx context.Context, progress io.Writer) (kwok string, stages []string, err error) {
	if progress == nil {
		progress = io.Discard
	}
	dir, err := kwokArtifact(progress).get(ctx, progress)
	if err != nil {
		return "", nil, fmt.Errorf("build kwok: %w", err)
	}
	for _, stage := range kwokStages {
		stages = append(stages, filepath.Join(dir, "stage", stage))
	}
	return filepath.Join(dir, "kwok"), stages, nil
}

// kwokArtifact builds KWOK from the module in tools and copies the stages from that
// module's source. go.sum pins both.
func kwokArtifact(progress io.Writer) artifact {
	const module = "sigs.k8s.io/kwok"
	b := goBuild{
		what: "kwok " + kwokVersion,
		took: "1 to 2 minutes",
		mod:  tools.KwokMod, sum: tools.KwokSum,
		ldflags:  "-s -w",
		packages: []string{module + "/cmd/kwok"},
	}
	return artifact{
		name:   "kwok-" + kwokVersion,
		recipe: append(b.recipe(), kwokStages[:]...),
		make: func(ctx context.Context, sup *proc.Supervisor, out, scratch string) error {
			if err := b.run(ctx, sup, progress, out, scratch); err != nil {
				return err
			}
			source, err := b.command(scratch, "list", "-m", "-f", "{{.Dir}}", module)
			if err != nil {
				return err
			}
			var dir bytes.Buffer
			source.Stdout = &dir
			if err := run(ctx, sup, source, nil); err != nil {
				return err
			}
			return copyStages(filepath.Join(strings.TrimSpace(dir.String()), "kustomize", "stage"), filepath.Join(out, "stage"))
		},
	}
}

func copyStages(from, to string) error {
	for _, stage := range kwokStages {
		content, err := os.ReadFile(filepath.Join(from, stage))
		if err != nil {
			return fmt.Errorf("stage of the module: %w", err)
		}
		target := filepath.Join(to, stage)
		if err := os.MkdirAll(filepath.Dir(target), 0o755); err != nil {
			return err
		}
		if err := os.WriteFile(target, content, 0o644); err != nil {
			return err
		}
	}
	return nil
}
