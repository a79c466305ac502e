package main

import (
	"os"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// The Dockerfile says again what the recipes say, for those who publish images.
func TestDockerfileMakesTheSameImages(t *testing.T) {
	raw, err := os.ReadFile("Dockerfile")
	require.NoError(t, err)
	stages := map[string]string{}
	for _, part := range regexp.MustCompile(`(?m)^FROM `).Split(string(raw), -1)[1:] {
		from, instructions, _ := strings.Cut(part, "\n")
		words := strings.Fields(from)
		stages[words[len(words)-1]] = instructions
	}
	require.Len(t, stages, len(imageNames())-1+2, "one for each image but Envoy's, build and base")

	require.Contains(t, stages["build"], `"`+linkerFlags("$VERSION")+`"`)
	require.Contains(t, stages["build"], "CGO_ENABLED=0")
	require.Contains(t, stages["build"], " -o /out/ ./cmd/"+strings.Join(shippedPrograms(), " ./cmd/")+"\n",
		"it builds no other program")
	require.Contains(t, stages["base"], "USER "+user+"\n")
	require.Contains(t, stages["base"], "PATH="+binaries+"\n")
	require.Contains(t, stages["base"], "org.opencontainers.image.source="+repository)
	for name, r := range recipes() {
		if name == envoyImage {
			continue
		}
		want := `LABEL org.opencontainers.image.title="` + r.title + "\"\n"
		for _, program := range r.programs {
			want += "COPY --from=build /out/" + program + " " + binaries + "/\n"
		}
		want += `ENTRYPOINT ["` + binaries + "/" + r.programs[len(r.programs)-1] + "\"]"
		require.Equal(t, want, strings.TrimSpace(stages[name]), name)
	}

	module, err := os.ReadFile("../../go.mod")
	require.NoError(t, err)
	version := regexp.MustCompile(`(?m)^go (\d+\.\d+)`).FindSubmatch(module)
	require.Contains(t, string(raw), "golang:"+string(version[1])+" ")
}
