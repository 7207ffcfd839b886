// Explain photos with a camserve server. README.md shows how to build this client and the code that protoc generates.
//
//     java ExplainPhotos localhost:50051 out cat.jpg dog.jpg

import camserve.v1.Explain.ExplainRequest;
import camserve.v1.Explain.ExplainResponse;
import camserve.v1.Explain.Explanation;
import camserve.v1.Explain.ImageFormat;
import camserve.v1.Explain.Method;
import camserve.v1.Explain.Prediction;
import camserve.v1.Explain.Rendering;
import camserve.v1.ExplainServiceGrpc;
import com.google.protobuf.ByteString;
import io.grpc.ManagedChannel;
import io.grpc.ManagedChannelBuilder;
import io.grpc.StatusRuntimeException;
import java.io.IOException;
import java.nio.file.Files;
import java.nio.file.NoSuchFileException;
import java.nio.file.Path;
import java.nio.file.StandardCopyOption;
import java.nio.file.StandardOpenOption;
import java.util.HashSet;
import java.util.List;
import java.util.Locale;
import java.util.Set;
import java.util.UUID;
import java.util.concurrent.TimeUnit;
import java.util.regex.Pattern;

/** Explains each photo with one call, which has a deadline. */
public final class ExplainPhotos {
  private static final int MAX_MESSAGE_BYTES = 64 << 20; // an overlay can be larger than gRPC's default of 4 MiB
  private static final int TIMEOUT_SECONDS = 30;

  private final ExplainServiceGrpc.ExplainServiceBlockingStub service;
  private final Path folder;
  private final Set<String> usedNames = new HashSet<>();

  private ExplainPhotos(ManagedChannel channel, Path folder) {
    this.service = ExplainServiceGrpc.newBlockingStub(channel);
    this.folder = folder;
  }

  public static void main(String[] arguments) throws IOException {
    if (arguments.length < 3) {
      System.err.println("usage: java ExplainPhotos SERVER FOLDER PHOTO..., such as localhost:50051 out cat.jpg");
      System.exit(1);
    }
    // For TLS, call useTransportSecurity(), and send a token in the metadata, as "authorization: Bearer ...". Without
    // TLS, no proxy is used: it could read and change all messages.
    ManagedChannel channel =
        ManagedChannelBuilder.forTarget(arguments[0])
            .usePlaintext()
            .proxyDetector(address -> null)
            .maxInboundMessageSize(MAX_MESSAGE_BYTES)
            .build();
    Path folder = Files.createDirectories(Path.of(arguments[1]));
    boolean succeeded = true;
    try {
      ExplainPhotos client = new ExplainPhotos(channel, folder);
      for (String photo : List.of(arguments).subList(2, arguments.length)) {
        succeeded &= client.explain(Path.of(photo));
      }
    } finally {
      channel.shutdownNow();
    }
    System.exit(succeeded ? 0 : 1);
  }

  /** Explains a photo and prints a line with the outcome; returns true if a picture was written. */
  private boolean explain(Path photo) throws IOException {
    try {
      ByteString image = ByteString.copyFrom(Files.readAllBytes(photo));
      ExplainResponse response = service.withDeadlineAfter(TIMEOUT_SECONDS, TimeUnit.SECONDS).explain(request(image));
      System.out.println(printable(photo + ": " + save(photo, response)));
      return true;
    } catch (StatusRuntimeException error) {
      System.err.println(printable(photo + ": " + error.getStatus().getDescription()));
    } catch (NoSuchFileException error) {
      System.err.println(printable(photo + ": no such file"));
    }
    return false;
  }

  private static ExplainRequest request(ByteString image) {
    return ExplainRequest.newBuilder()
        .setImage(image)
        .addMethods(Method.newBuilder().setName("gradcam"))
        .setRendering(Rendering.newBuilder().setOverlay(ImageFormat.IMAGE_FORMAT_JPEG))
        .build();
  }

  private String save(Path photo, ExplainResponse response) throws IOException {
    Explanation explanation = response.getExplanations(0);
    Path path = folder.resolve(nameOf(photo) + "." + explanation.getMethod().replaceAll("[^\\w-]+", "_") + ".jpg");
    // A temporary file is written and then moved: a link at the path is replaced, not followed.
    Path temporary = folder.resolve("." + UUID.randomUUID());
    Files.write(temporary, explanation.getOverlay().getData().toByteArray(), StandardOpenOption.CREATE_NEW);
    Files.move(temporary, path, StandardCopyOption.ATOMIC_MOVE, StandardCopyOption.REPLACE_EXISTING);
    Prediction target = explanation.getTarget();
    String label = target.getLabel().isEmpty() ? "class " + target.getClassIndex() : target.getLabel();
    String layer = explanation.getLayer();
    return String.format(Locale.ROOT, "%.2f %s by %s: %s", target.getProbability(), label, layer, path);
  }

  /** Escapes control characters, so that a terminal does not act on text from a server or on a file name. */
  private static String printable(String text) {
    return Pattern.compile("[\\p{Cc}\\p{Zl}\\p{Zp}\\u061c\\u200e\\u200f\\u202a-\\u202e\\u2066-\\u2069]")
        .matcher(text)
        .replaceAll(match -> String.format("\\\\u{%x}", match.group().codePointAt(0)));
  }

  /** Returns a unique name for the photo's picture: its stem, with a number if another has it. Case is ignored. */
  private String nameOf(Path photo) {
    String stem = photo.getFileName().toString().replaceFirst("\\.[^.]*$", "");
    String name = stem;
    for (int number = 2; !usedNames.add(name.toLowerCase(Locale.ROOT)); number++) {
      name = stem + "-" + number;
    }
    return name;
  }
}
